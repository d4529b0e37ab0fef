"""Images resized on a GPU: the workers' bits, batch after batch on real streams, and the service's rows."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.engine.copies import copies_of
from encoder_service.engine.patches import upload_of
from encoder_service.engine.resizing import ResizeStage, Resizing, open_resizing, packing_of, span_bytes
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import Passage, streams_of
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.frames import ImagePreprocessor
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import PreprocessOptions
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.fakes import FakeTower
from tests.integration.conftest import running
from tests.unit.ingest import image_files

pytestmark = pytest.mark.gpu

RNG = secrets.SystemRandom()
PLAIN = PreprocessOptions()
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
LIMITS = DecodeLimits(1 << 28, 1 << 26)
QWEN = QwenVLPreprocessor(QwenVLSettings(16, 2, 2, 65_536, 1 << 22, HALF), LIMITS)
KIMI = MoonViTPreprocessor(MoonViTSettings(14, 2, 16_384, 512, HALF), LIMITS)
ROOM_BYTES = 24 << 20
SLOT_BYTES = 64 << 20


class DeviceTower(FakeTower):
    """With the preprocessor's patches, on the device as far as anybody asks."""

    def __init__(self, preprocessor: ImagePreprocessor, device: torch.device) -> None:
        super().__init__()
        self.patch_size = preprocessor.settings.patch_size  # type: ignore[attr-defined]
        self.to(device)


def picture(height: int, width: int) -> np.ndarray:
    """Noise over a slope: overshoots as well as smooth places."""
    slope = np.linspace(0, 255, height * width * 3).reshape(height, width, 3)
    noise = np.random.default_rng().integers(-90, 91, (height, width, 3))
    return np.clip(slope + noise, 0, 255).astype(np.uint8)


def random_sides(num_images: int) -> list[tuple[int, int]]:
    return [(RNG.randint(40, 1500), RNG.randint(40, 1500)) for _ in range(num_images)]


@pytest.mark.parametrize("preprocessor", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_p14_p20_batches_on_their_way_are_the_workers_bits(
    preprocessor: ImagePreprocessor, device: torch.device
) -> None:
    """While the compute stream is kept busy, through memory that takes a few images at a time."""
    resizing, tower = Resizing(device, ROOM_BYTES), DeviceTower(preprocessor, device)
    with torch.cuda.device(device):
        streams, copies = streams_of(device, time.monotonic), copies_of(device)
        resizes = ResizeStage(ROOM_BYTES, 16, device, streams, copies)
        staging = PixelStaging(SLOT_BYTES, 16, device, streams, copies, resizes)
        found, expected = [], []
        for sides in [[(1500, 1400)] * 5] + [random_sides(RNG.randint(1, 5)) for _ in range(11)]:
            loaded = []
            for height, width in sides:
                data = image_files.ppm(picture(height, width))
                fit = preprocessor.probe_fit(data, PLAIN)
                assert fit is not None
                assert span_bytes(packing_of(fit)) <= ROOM_BYTES
                item, _, _ = resizing.load(preprocessor, data, fit, tower)
                loaded.append(item)
                expected.append(preprocessor.load_image(data, PLAIN)[0].frames_THWC)
            uploads = [upload_of(item, tower) for item in loaded]
            rows = staging.rows_of(b"".join(one.row for one in uploads), len(uploads))
            assert staging.fits(rows.add_up(), len(uploads))
            event = streams.make_event()
            passage = Passage(event, event)
            slot = staging.send(
                rows,
                [one.pixels for one in uploads],
                passage,
                all_pinned=True,
                packed=[one.packed for one in uploads],
            )
            torch.cuda._sleep(RNG.randint(0, 4_000_000))  # type: ignore[no-untyped-call]  # read late
            for offset, one in zip(rows.offsets.tolist(), uploads, strict=True):
                found.append(slot.read(offset, one.staged).clone())
            streams.compute.record(event)
        torch.cuda.synchronize(device)
    assert resizes.num_groups > 12, "the first five have no room together"
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(here.cpu(), there), f"image {number} of {tuple(there.shape)}"


def test_the_device_gives_the_hosts_bits_at_start(device: torch.device) -> None:
    assert open_resizing("device", 1 << 20, device) is not None


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
@pytest.mark.parametrize(("tower", "dtype"), [("auto", "bfloat16"), ("plain", "float32")])
def test_rows_and_keys_of_the_service_are_those_of_the_workers_resize(
    family: str, tower: str, dtype: str, device: torch.device, tmp_path: Path
) -> None:
    checkpoint = tmp_path / family
    make_checkpoint(checkpoint, family, "tiny", 3)
    sizes = [(RNG.randint(100, 1200), RNG.randint(100, 1200)) for _ in range(12)] + [(2000, 3000), (256, 256)]
    files = [image_files.ppm(picture(*size)) for size in sizes]
    found: dict[str, list[EncodedRows]] = {}
    for where in ("host", "device"):
        with (
            running(
                checkpoint,
                device,
                dtype=dtype,
                tower=tower,
                resize=where,
                device_resize_bytes=ROOM_BYTES,
                deterministic=True,
            ) as service,
            VisionEncoderClient(service.target) as client,
        ):
            one_by_one = [client.encode([ImageItem(data)])[0] for data in files[:6]]
            rows = one_by_one + list(client.encode([ImageItem(data) for data in files[6:]]))
            assert all(isinstance(one, EncodedRows) for one in rows)
            found[where] = rows  # type: ignore[assignment]
            pipeline = service.service.pipeline
            assert pipeline is not None
            resizing, graphs = pipeline.engine.resizing, pipeline.engine.graphs
            assert (resizing is None) == (where == "host")
            if resizing is not None:
                assert resizing.counts["device"] >= 10
                assert resizing.counts["host_large"] == 1
            assert (graphs is None) == (tower == "plain")
            assert service.on_loop(lambda pipeline=pipeline: pipeline.admission.num_bytes) == 0
    for here, there in zip(found["device"], found["host"], strict=True):
        assert here.key == there.key
        assert here.grid_thw == there.grid_thw
        # Batches may form differently, and then rows round differently; other pixels would differ by more.
        difference = here.torch().cpu().double() - there.torch().cpu().double()
        assert float(difference.norm() / there.torch().cpu().double().norm()) < 2e-2
    for here, there in zip(found["device"][:6], found["host"][:6], strict=True):
        assert torch.equal(here.torch().cpu(), there.torch().cpu()), "alone in its batch, the same bits"
