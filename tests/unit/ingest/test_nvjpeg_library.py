"""What the library behind the device's JPEG decoder is told, by a stand-in for it: no device is needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.ingest import nvjpeg
from encoder_service.ingest.device_decode import DeviceMemoryFull, open_decoding
from encoder_service.ingest.nvjpeg import NvJpegDecoder, load_library


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(
        ConfigurationError, match=r"needs the package nvidia-nvimgcodec-cu13, .* extra nvjpeg"
    ):
        open_decoding("device", torch.device("cuda:0"))


def test_the_library_is_imported_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("nvidia.nvimgcodec")
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", library)
    monkeypatch.setenv("PYNVIMGCODEC_VERBOSITY", "4")
    assert load_library() is library
    assert nvjpeg.os.environ["PYNVIMGCODEC_VERBOSITY"] == "4", "what somebody set stays"


class Recorded:
    """Keeps what the library is told. answers: of ``decode``, in turn."""

    def __init__(self, answers: list[Any]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.made: dict[str, Any] = {}
        self.BackendKind = SimpleNamespace(HYBRID_CPU_GPU="hybrid", HW_GPU_ONLY="hardware", CPU_ONLY="cpu")
        self.ColorSpec = SimpleNamespace(SRGB="srgb")
        self.SampleFormat = SimpleNamespace(I_RGB="rgb")
        self._answers = answers

    def Backend(self, kind: str) -> str:
        return kind

    def DecodeParams(self, **given: Any) -> dict[str, Any]:
        return given

    def CodeStream(self, data: bytes) -> bytes:
        return data

    def Decoder(self, **given: Any) -> Any:
        self.made = given

        def decode(stream: bytes, **options: Any) -> Any:
            self.calls.append(options)
            answer = self._answers[len(self.calls) - 1]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(decode=decode)


class FakeStream:
    cuda_stream = 77

    def __init__(self, device: object = None) -> None:
        pass

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "a thread that waits must sleep"
        self.steps: list[str] = []

    def record(self, stream: object) -> None:
        self.steps.append("record")

    def synchronize(self) -> None:
        self.steps.append("synchronize")


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    real = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda image, device: real(image))


@pytest.mark.usefixtures("without_device")
def test_the_library_is_told_one_engine_its_stream_and_the_memory_to_use_again() -> None:
    first, second = (np.full((2, 3, 3), level, np.uint8) for level in (7, 9))
    no_memory = RuntimeError("CUDA Runtime failure: cudaErrorMemoryAllocation")
    other_size = np.zeros((5, 5, 3), np.uint8)
    library = Recorded([first, second, None, first, other_size, no_memory, ValueError("odd"), first])
    decoder = NvJpegDecoder(library, torch.device("cuda:1"), "cuda")  # type: ignore[arg-type]
    assert library.made == {
        "device_id": 1,
        "max_num_cpu_threads": 1,
        "backends": ["hybrid"],
        "options": ":fancy_upsampling=1",
    }
    out = torch.zeros((2, 3, 3), dtype=torch.uint8)
    assert decoder.decode(b"a", out)
    assert out.unique().tolist() == [7]
    assert decoder.decode(b"b", out)
    assert out.unique().tolist() == [9]
    assert not decoder.decode(b"refused", out)
    assert decoder.decode(b"c", out)
    assert not decoder.decode(b"of another size", out)
    with pytest.raises(DeviceMemoryFull, match="MemoryAllocation"):
        decoder.decode(b"d", out)
    with pytest.raises(ValueError, match="odd"):
        decoder.decode(b"e", out)
    assert decoder.decode(b"f", out)
    kept = [call["image"] for call in library.calls]
    assert [one is None for one in kept] == [True, False, False, True, False, True, True, True]
    assert kept[1] is first
    assert kept[2] is second
    assert {call["cuda_stream"] for call in library.calls} == {77}
    assert library.calls[0]["params"] == {
        "apply_exif_orientation": False,
        "color_spec": "srgb",
        "sample_format": "rgb",
    }


@pytest.mark.usefixtures("without_device")
@pytest.mark.parametrize(("free_bytes", "is_full"), [(71, True), (72, False)])
def test_no_image_for_want_of_memory_is_told_from_a_file_that_is_refused(
    free_bytes: int, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an H200 answers: no image and no exception, and a line on stderr."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 31))
    decoder = NvJpegDecoder(Recorded([None]), torch.device("cuda:0"), "cuda")  # type: ignore[arg-type]
    out = torch.zeros((2, 3, 3), dtype=torch.uint8)
    if is_full:
        with pytest.raises(DeviceMemoryFull, match="71 bytes are free for an image of 18"):
            decoder.decode(b"a", out)
    else:
        assert not decoder.decode(b"a", out)


@pytest.mark.usefixtures("without_device")
def test_the_devices_own_engine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorded([])
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", library)
    names = [nvjpeg.open_nvjpeg(torch.device("cuda:0"), engine).name for engine in ("cuda", "hardware")]
    assert names == ["nvjpeg engine=cuda upsampling=fancy", "nvjpeg engine=hardware upsampling=fancy"]
    NvJpegDecoder(library, torch.device("cuda:0"), "hardware")  # type: ignore[arg-type]
    assert library.made["backends"] == ["hardware"]
