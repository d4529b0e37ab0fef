"""Images on their way through the device's resize: in any order of its streams, through the whole service,
and where they go when there is no room."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service import app
from encoder_service.engine import resizing as resizing_module
from encoder_service.engine.copies import Copies, HostCopies, TorchCopies
from encoder_service.engine.launch import TowerLauncher
from encoder_service.engine.patches import upload_of
from encoder_service.engine.resizing import (
    DECODED_SHARE,
    MAX_SIDE,
    Resizing,
    open_resizing,
    packed_item,
    packing_of,
    pinned_bytes,
    span_bytes,
)
from encoder_service.errors import UndecodableImage, VisionEncoderError
from encoder_service.ingest.frames import ImagePreprocessor, resize_bicubic
from encoder_service.ingest.preprocessor import Fit
from encoder_service.scheduler.admission import Admission
from encoder_service.towers.kernels.resize import pack
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import FrameItem, Grid, PreprocessOptions, TowerItem
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.fakes import FakeTower
from tests.integration.conftest import running
from tests.unit.engine.stepped_device import SteppedDevice
from tests.unit.engine.test_launch import Checker, Favouring, Rig, random_item
from tests.unit.ingest import image_files
from tests.unit.ingest.test_preprocessors import KIMI, QWEN

# On a GPU, where kernels are compiled, tests/gpu/test_device_resize.py takes this one's place.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter, without a GPU")

CPU = torch.device("cpu")
PLAIN = PreprocessOptions()
# Of the device's memory: room for one or two of the images below at a time.
ROOM_BYTES = 1280


def random_packed(generator: random.Random, tower: Any, grid: Grid | None = None) -> FrameItem:
    """An image that becomes one of up to 6x4 patches of a pixel each, some of them padding."""
    grid = grid or Grid(1, 2 * generator.randint(1, 3), 2 * generator.randint(1, 2))
    before = generator.randint(1, 9), generator.randint(1, 9)
    after = generator.randint(1, grid.h), generator.randint(1, grid.w)
    image_HWC = torch.from_numpy(
        np.random.default_rng(generator.getrandbits(32)).integers(0, 256, (*before, 3), dtype=np.uint8)
    )
    packing = packing_of(Fit(*before, *after, grid.h, grid.w, grid))
    return packed_item(pack(image_HWC, packing), packing, grid, tower)


def resized_on_host(item: FrameItem) -> FrameItem:
    """What the workers would have made of a packed item; any other as it is."""
    packed = getattr(item.upload, "packed", None)
    if packed is None:
        return item
    packing = packed.packing
    resized = resize_bicubic(item.frames_THWC[0], packing.new_rows, packing.new_columns)
    right, below = packing.width - packing.new_columns, packing.height - packing.new_rows
    return FrameItem(torch.nn.functional.pad(resized, (0, 0, 0, right, 0, below)).unsqueeze(0), item.grid)


class ResizingRig(Rig):
    """With a device that resizes."""

    def __init__(
        self,
        device: SteppedDevice,
        *,
        merges_time: bool = False,
        replayed: bool = False,
        copies: Copies | None = None,
        has_graphs: bool = True,
    ) -> None:
        super().__init__(device, merges_time=merges_time, replayed=replayed, copies=copies)
        self.launcher = TowerLauncher(
            self.tower,  # type: ignore[arg-type]
            self.preprocessor,
            self.runner if has_graphs else None,
            clock=itertools.count().__next__,
            resizing=Resizing(CPU, ROOM_BYTES),
        )

    def expected(self, items: list[TowerItem]) -> list[torch.Tensor]:
        return super().expected(
            [resized_on_host(item) if isinstance(item, FrameItem) else item for item in items]
        )

    @property
    def num_groups(self) -> int:
        staging = self.launcher._pixels
        assert staging is not None
        assert staging._resizes is not None
        return staging._resizes.num_groups


@pytest.mark.parametrize("copies", [HostCopies(), TorchCopies(CPU)], ids=["addresses", "tensors"])
@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 1 << 30),
    merges_time=st.booleans(),
    replayed=st.booleans(),
    actions=st.lists(st.sampled_from("llfss"), max_size=16),
)
def test_p14_p30_images_are_resized_in_any_order_of_the_device(
    copies: Copies, merges_time: bool, replayed: bool, seed: int, actions: list[str]
) -> None:
    """Packed images beside frames and patches, more than pass through the memory at a time; what the host
    had is overwritten as soon as a batch was waited for."""
    generator = random.Random(seed)
    device = SteppedDevice(Favouring(generator))
    rig = ResizingRig(device, merges_time=merges_time, replayed=replayed, copies=copies)
    checker = Checker(rig, generator)

    def items() -> list[TowerItem]:
        return [
            random_packed(generator, rig.tower) if generator.random() < 0.6 else random_item(generator)
            for _ in range(generator.randint(1, 4))
        ]

    for action in actions:
        if action == "s":
            for _ in range(generator.randint(1, 8)):
                device.step()
        elif action == "f" or len(checker.in_flight) == 2:
            if checker.in_flight:
                checker.finish(items() if generator.random() < 0.3 else None)
        else:
            checker.launch(items())
    while checker.in_flight:
        checker.finish()


def test_p17_a_batch_passes_through_the_memory_in_as_many_groups_as_it_takes() -> None:
    generator = random.Random(3)
    rig = ResizingRig(SteppedDevice(lambda count: 0))
    items: list[TowerItem] = [random_packed(generator, rig.tower, Grid(1, 4, 2)) for _ in range(4)]
    packed = [upload_of(item, rig.tower).packed for item in items]  # type: ignore[arg-type]
    spans = [one.span_bytes for one in packed if one is not None]
    assert max(spans) <= ROOM_BYTES < sum(spans)
    checker = Checker(rig)
    checker.launch(items)
    assert rig.device.steps == 0, "the host does not wait for the device"
    checker.finish()
    assert 1 < rig.num_groups < 4


@pytest.mark.parametrize("has_graphs", [True, False])
def test_p29_images_of_batches_without_a_slot_are_resized_alone(has_graphs: bool) -> None:
    """Beyond the largest bucket, and on the plain tower."""
    generator = random.Random(5)
    rig = ResizingRig(SteppedDevice(lambda count: 0), has_graphs=has_graphs)
    large = Grid(1, 10, 6)
    packing = packing_of(Fit(7, 5, 9, 6, 10, 6, large))
    image_HWC = torch.arange(7 * 5 * 3).to(torch.uint8).view(7, 5, 3)
    items: list[TowerItem] = [random_packed(generator, rig.tower) for _ in range(3)]
    items.append(packed_item(pack(image_HWC, packing), packing, large, rig.tower))  # type: ignore[arg-type]
    checker = Checker(rig)
    checker.launch(items)
    checker.finish()
    if has_graphs:
        assert rig.num_groups == 0
        assert rig.runner.counters.eager_runs == 1


def test_p27_warming_up_resizes_too() -> None:
    rig = ResizingRig(SteppedDevice(lambda count: 0))
    rig.launcher.warm_up([Grid(1, 2, 2), Grid(1, 4, 4)])
    assert rig.num_groups == 2


# Which images


def fit_of(height: int, width: int, preprocessor: ImagePreprocessor = KIMI) -> Fit:
    return preprocessor.fit_of(height, width, PLAIN)


def test_p17_decoded_images_count_with_what_callers_sent_and_too_many_stay_on_the_host() -> None:
    resizing, fit = Resizing(CPU, 1 << 20), fit_of(100, 90)
    each = pinned_bytes(packing_of(fit).num_bytes)
    admission = Admission(max_patches=1000, max_bytes=int((3 * each + 30) / DECODED_SHARE))
    permits = [admission.acquire(10) for _ in range(4)]
    assert [resizing.takes(fit, permit) for permit in permits] == [True, True, False, False]
    assert admission.num_bytes == 40 + 2 * each
    assert resizing.counts == {"device": 2, "host_large": 0, "host_busy": 2}
    permits[0].release()
    assert resizing.takes(fit, permits[2])
    for permit in permits:
        permit.release()
    assert admission.num_bytes == 0


def test_p17_images_that_are_too_large_for_the_devices_memory_stay_on_the_host() -> None:
    admission = Admission(max_patches=1000, max_bytes=1 << 40)
    permit = admission.acquire(0)
    fit = fit_of(100, 90)
    needed = span_bytes(packing_of(fit))
    assert not Resizing(CPU, needed - 1).takes(fit, permit)
    assert Resizing(CPU, needed).takes(fit, permit)
    resizing = Resizing(CPU, 1 << 40)
    assert not resizing.takes(fit_of(MAX_SIDE + 1, 3), permit)
    assert resizing.counts == {"device": 0, "host_large": 1, "host_busy": 0}


def test_images_that_stay_as_they_are_are_not_handed_to_the_device() -> None:
    permit = Admission(max_patches=1000, max_bytes=1 << 40).acquire(0)
    resizing = Resizing(CPU, 1 << 30)
    assert not resizing.takes(fit_of(64, 96, QWEN), permit)
    assert not resizing.takes(fit_of(28, 56), permit)
    assert sum(resizing.counts.values()) == 0
    assert resizing.takes(fit_of(28, 55), permit), "padding alone is the device's too"
    assert permit.num_bytes > 0


# From files


FILES = image_files.every_file() | image_files.every_orientation()


@pytest.mark.parametrize("preprocessor", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_every_file_is_packed_with_the_pixels_that_the_workers_resize(
    preprocessor: ImagePreprocessor,
) -> None:
    resizing = Resizing(CPU, 1 << 24)
    tower = sized_tower(preprocessor)
    for name, data in FILES.items():
        fit = preprocessor.probe_fit(data, PLAIN)
        glanced = preprocessor.glance_at_fit(data, PLAIN)
        assert glanced is None or glanced == fit, name
        found, decode_ms, pack_ms = resizing.load(preprocessor, data, fit, tower)
        assert min(decode_ms, pack_ms) > 0
        expected, _, _ = preprocessor.load_image(data, PLAIN)
        assert found.grid == expected.grid == fit.grid, name
        assert torch.equal(resized_on_host(found).frames_THWC, expected.frames_THWC), name


def sized_tower(preprocessor: ImagePreprocessor) -> FakeTower:
    """With the preprocessor's patches."""
    tower = FakeTower()
    tower.patch_size = preprocessor.settings.patch_size  # type: ignore[attr-defined]
    return tower


@pytest.mark.parametrize("preprocessor", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_p33_broken_files_fail_as_they_do_on_the_workers(preprocessor: ImagePreprocessor) -> None:
    resizing, tower = Resizing(CPU, 1 << 24), sized_tower(preprocessor)
    whole = FILES["jpeg rgb"] if "jpeg rgb" in FILES else next(iter(FILES.values()))
    fit = preprocessor.probe_fit(whole, PLAIN)
    cut = whole[: len(whole) // 2]
    with pytest.raises(VisionEncoderError) as on_worker:
        preprocessor.load_image(cut, PLAIN)
    with pytest.raises(VisionEncoderError) as here:
        resizing.load(preprocessor, cut, fit, tower)
    assert (type(here.value), str(here.value)) == (type(on_worker.value), str(on_worker.value))
    other = image_files.ppm(np.zeros((fit.height + 1, fit.width, 3), np.uint8))
    with pytest.raises(UndecodableImage, match=f"promises {fit.width}x{fit.height} pixels"):
        resizing.load(preprocessor, other, fit, tower)


# At start


def test_the_device_is_tried_out_and_the_host_takes_over_where_bits_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_resizing("host", 1 << 20, CPU) is None
    found = open_resizing("device", 1 << 20, CPU)
    assert found is not None
    assert (found.device, found.num_bytes) == (CPU, 1 << 20)

    def one_off(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
        right = resize_bicubic(image_HWC, height, width)
        right[0, 0, 0] ^= 1
        return right

    monkeypatch.setattr(resizing_module, "resize_bicubic", one_off)
    with structlog.testing.capture_logs() as lines:
        assert open_resizing("device", 1 << 20, CPU) is None
    assert "1 of 5346 bytes differ from the host's" in lines[0]["reason"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with structlog.testing.capture_logs() as lines:
        assert open_resizing("device", 1 << 20, CPU) is None
    assert lines[0]["reason"] == "triton is not installed"


# Through the service


@pytest.fixture
def resizing_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Resizing]:
    """Services resize on the CPU, in the interpreter, which no setting asks for."""
    opened: list[Resizing] = []

    def open_here(where: str, num_bytes: int, device: torch.device) -> Resizing:
        assert where == "host"
        opened.append(Resizing(device, num_bytes))
        return opened[-1]

    monkeypatch.setattr(app, "open_resizing", open_here)
    return opened


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_rows_and_keys_are_those_of_the_workers_resize(
    family: str, tmp_path: Path, resizing_on_cpu: list[Resizing], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family, "tiny", 3)
    config = tmp_path / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"shortest_edge": 65536', '"shortest_edge": 1024'))
    rng = np.random.default_rng()
    images = [
        image_files.ppm(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        for size in ((61, 40), (29, 70), (28, 28), (64, 64), (3, 90))
    ]
    found: list[list[EncodedRows]] = []
    for _ in range(2):
        with running(tmp_path, CPU) as service, VisionEncoderClient(service.target) as client:
            one_by_one = [client.encode([ImageItem(data)])[0] for data in images]
            assert all(isinstance(rows, EncodedRows) for rows in one_by_one)
            found.append(one_by_one)  # type: ignore[arg-type]
            pipeline = service.service.pipeline
            assert pipeline is not None
            admission = pipeline.admission
            assert service.on_loop(lambda admission=admission: admission.num_bytes) == 0
        monkeypatch.undo()
    (on_device,) = resizing_on_cpu
    assert on_device.counts["device"] >= 3
    assert on_device.counts["device"] < len(images), "some stay as they are"
    for here, there in zip(*found, strict=True):
        assert here.key == there.key
        assert here.grid_thw == there.grid_thw
        assert torch.equal(here.torch(), there.torch())
