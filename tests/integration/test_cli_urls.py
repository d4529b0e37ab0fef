"""``encode`` against a real service that fetches URLs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.integration.test_process import client_command
from tests.integration.web import Files

pytestmark = pytest.mark.without_device


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
