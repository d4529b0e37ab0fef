"""``encode`` and ``bench`` against a real service: one with little room, and one that fetches URLs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import Result

from lm_adapter import ImageItem, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.integration.test_process import client_command
from tests.integration.web import Files

pytestmark = pytest.mark.without_device


def answer(done: Result) -> dict[str, Any]:
    """What the command printed last: the service of this process logs to the same place."""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_folder_waits_for_a_service_with_room_for_four(
    checkpoints: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    for number in range(100):
        path = tmp_path / "photos" / str(number % 7) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(32, 32))
    out = tmp_path / "rows.safetensors"
    with running(checkpoints["qwen3_vl"], device, max_calls=4) as found:
        server = ("--server", found.target)
        done = client_command("encode", *server, tmp_path / "photos", "--out", out)
        assert done.exit_code == 0, done.stderr
        assert "100 encoded in " in done.stdout
        with safe_open(out, "pt") as rows, VisionEncoderClient(found.target, timeout_s=60) as client:
            metadata = rows.metadata()
            assert sum(name.startswith("rows.") for name in rows.keys()) == 100  # noqa: SIM118
            for index in range(0, 100, 25):
                same = client.encode(ImageItem.from_path(metadata[f"path.{index}"]))
                assert torch.equal(rows.get_tensor(f"rows.{index}"), same.torch())
                assert metadata[f"key.{index}"] == same.key.hex()

        closed = client_command("bench", *server, "--sizes", "32x32", "--num-images", 20, "--json")
        assert closed.exit_code == 0, closed.stdout
        assert answer(closed)["num_images"] == 20
        opened = ("--rate", 500, "--num-images", 30, "--warm-up", 0)
        refused = client_command("bench", *server, "--sizes", "32x32", *opened, "--json")
        assert refused.exit_code == 1
        assert answer(refused)["failures"].keys() == {"TOO_MANY_CALLS"}


def test_urls_are_fetched_by_the_server_or_refused_in_a_sentence(
    service: RunningService,
    checkpoints: dict[str, Path],
    device: torch.device,
    tmp_path: Path,
) -> None:
    with Files({"/a.jpg": photo(image_format="JPEG")}) as images:
        url, out = f"{images.base}/a.jpg", tmp_path / "rows"
        refused = client_command("encode", "--server", service.target, url)
        assert refused.exit_code == 1
        assert (
            f"{url}: UNSUPPORTED_CONTENT: this server takes no URLs (its url_allow is empty)"
            in refused.stderr
        )
        with running(
            checkpoints["qwen3_vl"], device, url_allow=images.base, url_networks="127.0.0.0/8"
        ) as found:
            assert client_command("encode", "--server", found.target, url, "--out", out).exit_code == 0
            again = client_command("encode", "--server", found.target, url, "--out", out, "--resume")
            assert "0 encoded" in again.stdout
            assert "1 were there" in again.stdout
            other = client_command(
                "encode", "--server", found.target, url, "--out", out, "--resume", "--min-pixels", 9
            )
            assert "CHANGED" in other.stderr
    assert images.requested == ["/a.jpg"]
