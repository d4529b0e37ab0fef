"""Every command of docs/cli.md, as it stands, against the service that the page starts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import running
from tests.integration.test_process import ENV, ROOT

pytestmark = pytest.mark.without_device

ADDRESS = "127.0.0.1:50051"
SHIM = '#!/bin/sh\nexec "{python}" -m encoder_service "$@"\n'
CLIENTS = ("encode", "bench", "info", "health")


def lines() -> list[str]:
    page = (ROOT / "docs" / "cli.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=ENV | {"PATH": f"{folder}/bin:{ENV['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With the page's photographs, its checkpoint, its service, and ``vision-encoder`` on the path."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(ROOT / "tests" / "data" / "photos", folder / "photos")
    make, serve = (line for line in lines() if not any(f"vision-encoder {name}" in line for name in CLIENTS))
    command = folder / "bin" / "vision-encoder"
    command.parent.mkdir()
    command.write_text(SHIM.format(python=sys.executable))
    command.chmod(0o755)
    assert run(make, folder).returncode == 0
    assert serve == f"vision-encoder serve --model checkpoint --device cpu --listen {ADDRESS}"
    with running(folder / "checkpoint", torch.device("cpu")) as service:
        # The commands' default address is taken by whatever runs on this machine.
        command.write_text(command.read_text().replace('"$@"', f'"$@" --server {service.target}'))
        yield folder


@pytest.mark.extended
def test_the_commands_of_the_page_work(folder: Path) -> None:
    clients = [line for line in lines() if any(f"vision-encoder {name}" in line for name in CLIENTS)]
    assert len(clients) == 12
    for line in clients:
        done = run(line, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    made = {path.name for path in folder.glob("*.safetensors*")}
    assert made == {
        "rows.safetensors", "png.safetensors", "all-00001.safetensors", "all.safetensors.index.json"
    }  # fmt: skip
    assert (folder / "rows" / "photos" / "coffee.jpg.safetensors").exists()
