"""`download` and `serve` with a hub id, as processes that know the hub by its own variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.ready import ready_in
from tests.hub_server import FakeHub, serving
from tests.integration.test_process import ROOT

pytestmark = pytest.mark.without_device

MODEL = "acme/Seeing-8B"


@pytest.fixture
def fake(checkpoint: Path) -> Iterator[FakeHub]:
    with serving() as found:
        found.add(MODEL, checkpoint, token="sesame", gated=True)
        yield found


def start(fake: FakeHub, home: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    hub = {"HF_ENDPOINT": fake.url, "HF_HOME": str(home), "HF_TOKEN": "sesame", **variables}
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "VE_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "encoder_service", *words],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"} | hub,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_download_fetched_is_served_offline(fake: FakeHub, tmp_path: Path) -> None:
    """As the chart's pod does: an init container fetches, the encoder may only read."""
    out, errors = start(fake, tmp_path, "download", MODEL, "--revision", "main").communicate(timeout=120)
    assert Path(out.strip(), "model.safetensors").is_file(), errors
    assert out.startswith(str(tmp_path))
    assert "fetching vision tensors" in errors
    fake.requests.clear()
    serve = (
        *("serve", "--model", MODEL, "--device", "cpu", "--listen", "127.0.0.1:0", "--admin-listen", ""),
        *("--broker-path", ""),
    )
    process = start(fake, tmp_path, *serve, HF_HUB_OFFLINE="1")
    try:
        assert process.stdout is not None
        assert ready_in(process.stdout)["model"] == "Seeing-8B"
    finally:
        process.kill()
        process.communicate()
    assert fake.requests == []


@pytest.mark.parametrize(
    "command",
    [
        ("download",),
        ("serve", "--broker-path", "", "--listen", "127.0.0.1:0", "--admin-listen", "", "--model"),
    ],
)
def test_a_gated_model_ends_the_command_with_one_sentence(
    fake: FakeHub, tmp_path: Path, command: tuple[str, ...]
) -> None:
    process = start(fake, tmp_path, *command, MODEL, HF_TOKEN="")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == (1 if command == ("download",) else 2)
    assert command != ("download",) or out == ""
    assert (
        f"{MODEL} is gated: accept its terms at {fake.url}/{MODEL}, and set HF_TOKEN"
        in errors.splitlines()[-1]
    )
    assert "Traceback" not in errors


def test_a_pod_that_is_deleted_while_it_fetches_is_gone_at_once(fake: FakeHub, tmp_path: Path) -> None:
    """As the first process of its container, which SIGTERM ends only where it is handled."""
    fake.faults = [("hang", 0)]
    process = start(fake, tmp_path, "download", MODEL)
    try:
        assert fake.hanging.wait(60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
