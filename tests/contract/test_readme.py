"""Commands and examples of the README work as printed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.harness.ready import ready_in
from encoder_service.config import Settings
from lm_adapter import ImageItem, VisionEncoderClient
from tests.shell import ENCODER, serving, shell_with
from tests.shell import run as shell_run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")]
ADDRESS, HTTP_ADDRESS = "127.0.0.1:50051", "127.0.0.1:8000"
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("VE_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def encoder_command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "encoder_service", *words[1:]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A folder with the README's checkpoint, and the addresses of a service started by the README's command:
    of gRPC and of HTTP."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "tests").symlink_to(ROOT / "tests")
    (make,) = (words for words in shell_lines() if words[:2] == ["vision-encoder", "make-checkpoint"])
    subprocess.run(encoder_command(make), cwd=folder, env=ENV, check=True, timeout=120)
    (serve,) = (words for words in shell_lines() if words[:2] == ["vision-encoder", "serve"])
    assert {ADDRESS, HTTP_ADDRESS} <= set(serve)
    command = ["127.0.0.1:0" if word in (ADDRESS, HTTP_ADDRESS) else word for word in encoder_command(serve)]
    process = subprocess.Popen(
        [*command, "--admin-listen", "127.0.0.1:0"], cwd=folder, env=ENV, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = ready_in(process.stdout)
        yield folder, ready["listen"], ready["http"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_command_is_one_that_is_run_here() -> None:
    kinds = {tuple(words[:2]) if words[0] == "vision-encoder" else words[0] for words in shell_lines()}
    commands = ("make-checkpoint", "serve", "info", "encode", "health")
    assert kinds == {"make", "pip", "curl", *(("vision-encoder", name) for name in commands)}
    for words in shell_lines():
        if words[0] == "make":
            run(["make", "-n", "--assume-old=.venv/.setup-done", *words[1:]], ROOT)


@pytest.mark.extended
def test_the_client_commands(running: tuple[Path, str, str]) -> None:
    folder, target, _ = running
    clients = [words for words in shell_lines() if words[1] in ("info", "encode", "health")]
    assert len(clients) == 3
    for words in clients:
        run([word.replace(ADDRESS, target) for word in encoder_command(words)], folder)
    assert (folder / "rows.safetensors").stat().st_size > 0


@pytest.mark.extended
def test_the_command_without_python(running: tuple[Path, str, str]) -> None:
    folder, target, http_address = running
    (words,) = (words for words in shell_lines() if words[0] == "curl")
    run([word.replace(HTTP_ADDRESS, http_address) for word in words], folder)
    with VisionEncoderClient(target) as client:
        rows = client.encode(ImageItem.from_path(folder / "tests/data/photos/coffee.jpg"))
    assert torch.equal(load_file(folder / "http.safetensors")["rows.0"], rows.torch())


@pytest.mark.extended
def test_the_python_examples(running: tuple[Path, str, str]) -> None:
    folder, target, _ = running
    ask, engine = (block.replace(ADDRESS, target) for block in blocks("python"))
    assert "228" in run([sys.executable, "-c", ask], folder)
    (tokens,) = ast.literal_eval(run([sys.executable, "-c", engine], folder))
    assert len(tokens) == 8


@pytest.mark.extended
def test_the_start_page_without_a_gpu(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text().partition("\n## Without a GPU\n")[2].partition("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines()
    programs = {"vision-encoder": ENCODER}
    shell = shell_with(tmp_path, programs, {"VE_LISTEN": "127.0.0.1:0", "VE_ADMIN_LISTEN": "127.0.0.1:0"})
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    make, serve, encode = (
        line.removeprefix("encoder/bin/") for line in lines if line.startswith("encoder/bin/vision-encoder")
    )
    shell_run(make, shell, tmp_path)
    with serving(serve, shell, tmp_path) as ready:
        shell_run(f"{encode} --server {ready['listen']}", shell, tmp_path)
    assert (tmp_path / "rows.safetensors").stat().st_size > 0


@pytest.mark.extended
def test_the_demo_runs(tmp_path: Path) -> None:
    """The command of ``make demo``, with the smallest checkpoint."""
    assert "-m bench.demo" in run(["make", "-n", "demo"], ROOT)
    assert "same tokens" in run(
        [sys.executable, "-m", "bench.demo", "--size", "tiny", "--out", str(tmp_path)], ROOT
    )
    assert (tmp_path / "rows.png").stat().st_size > 10_000


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_variables_and_targets_of_the_documents_exist(document: Path) -> None:
    """An unknown variable stops a start."""
    assert set(re.findall(r"`make(?: -\w+)* ([a-z][a-z-]*)", document.read_text())) <= {*TARGETS}
    known = {f"VE_{name.upper()}" for name in Settings.model_fields} | {"VE_NAME", "VE_CONFIG"}
    assert set(re.findall(r"\bVE_[A-Z0-9_]*[A-Z0-9]\b", document.read_text())) <= known
