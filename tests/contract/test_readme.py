"""What the README tells a newcomer to type works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ADDRESS = "127.0.0.1:50051"
CASES = ("1x448", "1x1024", "8x1024", "32x448", "mixed", "clip")
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith("VE_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[list[str]]:
    return [
        words
        for block in blocks("sh")
        for line in block.splitlines()
        if (words := shlex.split(line, comments=True))
    ]


def encoder_command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "encoder_service", *words[1:]]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with the README's checkpoint, a service started by the README's own command (on a free port)
    and that port's address."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "tests").symlink_to(ROOT / "tests")
    (make,) = (words for words in shell_lines() if words[:2] == ["vision-encoder", "make-checkpoint"])
    subprocess.run(encoder_command(make), cwd=folder, env=ENV, check=True, timeout=120)
    (serve,) = (words for words in shell_lines() if words[:2] == ["vision-encoder", "serve"])
    assert ADDRESS in serve
    command = [word.replace(ADDRESS, "127.0.0.1:0") for word in encoder_command(serve)]
    process = subprocess.Popen(
        [*command, "--admin-listen", "127.0.0.1:0"], cwd=folder, env=ENV, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r" at (\S+)", process.stdout.readline())
        assert found
        yield folder, found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_every_command_is_one_that_a_test_here_runs_or_checks() -> None:
    kinds = {tuple(words[:2]) if words[0] == "vision-encoder" else words[0] for words in shell_lines()}
    assert kinds == {
        "make",
        "pip",
        *(("vision-encoder", name) for name in ("make-checkpoint", "serve", "info", "encode", "health")),
    }
    assert len(blocks("python")) == 2


def test_the_client_commands(workplace: tuple[Path, str]) -> None:
    folder, target = workplace
    clients = [words for words in shell_lines() if words[1] in ("info", "encode", "health")]
    assert len(clients) == 3
    for words in clients:
        command = [word.replace(ADDRESS, target) for word in encoder_command(words)]
        ended = subprocess.run(
            command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stderr
    assert (folder / "rows.safetensors").stat().st_size > 0


@pytest.mark.parametrize("index", [0, 1])
def test_the_python_examples(workplace: tuple[Path, str], index: int) -> None:
    folder, target = workplace
    code = blocks("python")[index].replace(ADDRESS, target)
    assert target in code
    ended = subprocess.run(
        [sys.executable, "-c", code + ("\nprint(len(tokens[0]))" if index else "")],
        cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    if index:
        assert ended.stdout.split()[-1] == "8"
    else:
        assert "228" in ended.stdout


def test_make_targets_exist() -> None:
    for words in shell_lines():
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_the_demo_runs(tmp_path: Path) -> None:
    """What ``make demo`` runs after installing, with the smallest checkpoint."""
    recipe = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "bench/demo.py" in recipe
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "bench/demo.py", "--size", "tiny", "--out", str(tmp_path)],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "same tokens" in ended.stdout
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    assert time.monotonic() - started < 180


def test_the_figures_are_those_of_the_result_file() -> None:
    (name,) = re.findall(r"<!-- figures: (\S+) -->", README)
    records = json.loads((ROOT / name).read_text())["records"]
    medians = {(one["family"], one["case"], one["variant"]): one["median_ms"] for one in records}
    families = {"Qwen3-VL": "qwen3_vl", "Qwen3.5": "qwen3_5", "Kimi-K2.5": "kimi_k25"}
    variants = {"service": "graph", "plain": "plain", "reference": "ref_sdpa"}
    rows = re.findall(r"^\| ([\w.-]+), (\w+) \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) == 9
    for family, variant, cells in rows:
        for case, cell in zip(CASES, cells.split(" | "), strict=True):
            assert float(cell) == round(medians[families[family], case, variants[variant]], 2)


def test_the_figures_of_deliveries_are_those_of_the_result_file() -> None:
    text = (ROOT / "docs/transports.md").read_text()
    labels = {
        "device_same_gpu": "device lease, same GPU",
        "device_nvlink": "device lease, NVLink",
        "host_shm": "host shared memory",
        "inline_uds": "inline, unix socket",
        "inline_tcp": "inline, TCP",
    }
    tables = re.findall(
        r"^<!-- figures: (\S+) -->\n\| milliseconds, median \(floor\) \| (.+) \|\n\|[-|]+\n((?:\|.*\n)+)",
        text,
        re.MULTILINE,
    )
    both = []
    for name, heading, lines in tables:
        result = json.loads((ROOT / name).read_text())
        records = {
            (one["path"], f"{one['bytes'] / 2**20:.3g} MiB"): one
            for one in result["records"]
            if one["concurrency"] == 1
        }
        paths = [path for path in labels if path != "device_nvlink" or result["num_gpus"] > 1]
        sizes = heading.split(" | ")
        assert set(records) == {(path, size) for path in paths for size in sizes}
        expected = []
        for path in paths:
            cells = [records[path, size] for size in sizes]
            figures = [f"{one['median_ms']:.2f} ({one['floor_ms']:.2f})" for one in cells]
            expected.append("| " + " | ".join([labels[path], *figures]) + " |")
        assert lines.splitlines() == expected
        both.append((result, records))
    (first, records), (second, latest) = both
    assert (first["num_gpus"], first["num_threads"]) == (2, 32)
    assert (second["num_gpus"], second["num_threads"]) == (1, 16)
    ways = {"within the GPU": "device_same_gpu", "over NVLink": "device_nvlink", "in host memory": "host_shm"}
    for label, path in ways.items():
        (found,) = re.findall(rf"^\| {label} \| (.+) \|$", text, re.MULTILINE)
        one = records[path, "32 MiB"]
        assert found.split(" | ") == [f"{one[name]:.2f}" for name in ("median_ms", "socket_ms", "grpc_ms")]
    uds, tcp = (latest[path, "32 MiB"]["ratio"] for path in ("inline_uds", "inline_tcp"))
    assert (
        f"{uds:.2f} times what a bare gRPC stream takes over a unix socket and {tcp:.2f} times over TCP"
        in text
    )
    assert f"is about {latest['host_shm', '32 MiB']['copy_ms']:.1f} ms" in text
    nvlink = records["device_nvlink", "32 MiB"]["median_ms"]
    assert f"32 MiB in {nvlink:.2f} ms over NVLink" in README
