"""A service whose JPEG files a stand-in for the device decodes: rows, keys, fingerprints, counts, pages."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service import app
from encoder_service.errors import StartupError
from encoder_service.ingest.device_decode import DeviceDecoding, open_decoding
from lm_adapter import EncodedRows, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.unit.ingest import image_files
from tests.unit.ingest.test_device_decode import Stand


def picture(height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(height).integers(0, 256, (height // 9, width // 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


FILES = [
    image_files.encode(picture(90, 140), "JPEG", quality=90),
    image_files.encode(picture(130, 70), "JPEG", progressive=True, subsampling=0),
    image_files.encode(picture(90, 150), "JPEG", exif=image_files.exif(6)),
    image_files.encode(picture(80, 80).convert("L"), "JPEG"),
    image_files.encode(picture(100, 110), "PNG"),
]


def page(service: RunningService, path: str) -> str:
    with urllib.request.urlopen(f"http://{service.service.admin_address}{path}", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Services decode with the stand-in, which no setting asks for on a CPU."""
    stand = Stand()

    def open_here(where: str, device: torch.device) -> DeviceDecoding | None:
        assert where == "host"
        return open_decoding("device", device, lambda device: stand.decoding)

    monkeypatch.setattr(app, "open_decoding", open_here)
    return stand


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_rows_are_near_the_hosts_under_keys_of_their_own(
    family: str,
    checkpoints: dict[str, Path],
    on_stand_in: Stand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[EncodedRows]] = []
    fingerprints = []
    for place in ("device", "host"):
        with (
            running(checkpoints[family], torch.device("cpu")) as service,
            VisionEncoderClient(service.target) as client,
        ):
            fingerprints.append(client.info().models[0].preprocess_fingerprint)
            rows = [client.encode([ImageItem(data)])[0] for data in FILES]
            assert all(isinstance(one, EncodedRows) for one in rows)
            found.append(rows)  # type: ignore[arg-type]
            (cut,) = client.encode([ImageItem(FILES[0][:300])])
            assert isinstance(cut, ItemFailed)
            assert "truncated" in str(cut), cut
            metrics = page(service, "/metrics")
            assert ('ve_decoded_items_total{place="device"} 4.0' in metrics) == (place == "device")
            assert ("ve_decoded_items" in metrics) == (place == "device")
            assert json.loads(page(service, "/v1/live"))["model"]["decode"] == place
        monkeypatch.undo()
    # Whether the cut file was refused by its header or by its pixels is the host's matter.
    assert on_stand_in.counts["device"] == 4
    assert set(on_stand_in.counts) == {"device", "host_format"}
    assert fingerprints[0] != fingerprints[1]
    for here, there in zip(*found, strict=True):
        assert here.key != there.key
        assert here.grid_thw == there.grid_thw
        one, other = (rows.torch().double().flatten() for rows in (here, there))
        near = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
        assert near > 0.995, "every level of the stand-in's is one off"
    assert torch.equal(found[0][-1].torch(), found[1][-1].torch()), "no JPEG file: the same pixels"
    assert not torch.equal(found[0][0].torch(), found[1][0].torch())


def test_a_service_does_not_start_with_a_decoder_that_cannot(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(lambda data: False)
    monkeypatch.setattr(
        app, "open_decoding", lambda _, device: open_decoding("device", device, lambda _: stand.decoding)
    )
    with (
        pytest.raises(StartupError, match="stand-in refuses a probe image"),
        running(checkpoints["qwen3_vl"], torch.device("cpu")),
    ):
        pass
