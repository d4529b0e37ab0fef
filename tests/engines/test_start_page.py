"""docs/start.md and examples/vllm.sh as they stand; ports, the model and the picture's URL are replaced."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from bench.harness.engine_checkpoints import write_checkpoint
from bench.harness.ports import free_port
from bench.harness.processes import ROOT, answers
from bench.harness.vllm import VLLM_ENVIRONMENT
from bench.harness.waiting import wait_until
from tests.integration.web import Files
from tests.shell import ENCODER, ENDS_S, run, shell_with

pytestmark = [pytest.mark.timeout(1200), pytest.mark.extended]
MODEL, PICTURE = "Qwen/Qwen3-VL-8B-Instruct", "https://github.com/pytorch/hub/raw/master/images/dog.jpg"
PHOTO = ROOT / "tests/data/photos/coffee.jpg"


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds ``vision-encoder`` and ``vllm`` of this interpreter."""
    programs = {"vision-encoder": ENCODER, "vllm": ("-m", "vllm.entrypoints.cli.main")}
    return shell_with(tmp_path, programs, VLLM_ENVIRONMENT)


def commands() -> dict[str, str]:
    """The page's commands by their first two words, without the folder of the encoder's environment."""
    blocks = re.findall(
        r"^```console\n(.*?)^```$", (ROOT / "docs/start.md").read_text(), re.MULTILINE | re.DOTALL
    )
    text = "".join(blocks).replace("encoder/bin/", "")
    first = "^(?:python3|pip|vision-encoder|vllm|curl) "
    found = re.findall(rf"{first}.*?(?={first}|\Z)", text, re.MULTILINE | re.DOTALL)
    return {" ".join(command.split()[:2]): command for command in found}


def test_the_start_page(tmp_path: Path, shell: dict[str, str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    encoder_port, port, admin_port = free_port(), free_port(), free_port()
    shell["VE_ADMIN_LISTEN"] = f"127.0.0.1:{admin_port}"
    with Files({"/dog.jpg": PHOTO.read_bytes()}) as files, (tmp_path / "log").open("wb") as log:
        replaced = {
            MODEL: str(checkpoint),
            "8000": str(port),
            "50051": str(encoder_port),
            PICTURE: f"{files.base}/dog.jpg",
            "PHOTO.jpg": str(PHOTO),
        }

        def command(beginning: str) -> str:
            text = commands()[beginning]
            for old, new in replaced.items():
                text = text.replace(old, new)
            return text

        shell["VE_LISTEN"] = f"127.0.0.1:{encoder_port}"
        running = []
        try:
            for beginning, url in (
                ("vision-encoder serve", f"http://127.0.0.1:{admin_port}/readyz"),
                ("vllm serve", f"http://127.0.0.1:{port}/health"),
            ):
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {command(beginning)}"],
                    env=shell,
                    cwd=tmp_path,
                    stdout=log,
                    stderr=log,
                )
                running.append(process)
                wait_until(lambda url=url: answers(url), beginning, ENDS_S)  # type: ignore[misc]
            for _ in range(2):
                ended = run(command("curl http://127.0.0.1:8000/v1/chat/completions"), shell, tmp_path)
                assert json.loads(ended.stdout)["choices"][0]["message"]["content"]
            metrics = httpx.get(f"http://127.0.0.1:{admin_port}/metrics").text
            assert 've_stage_seconds_count{stage="tower"} 1.0' in metrics
            run(
                f"{command('vision-encoder encode').strip()} --server 127.0.0.1:{encoder_port}",
                shell,
                tmp_path,
            )
            assert (tmp_path / "rows.safetensors").stat().st_size > 0
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(60)


def test_the_example(tmp_path: Path, shell: dict[str, str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_vl")
    shell |= {"ENCODER_PORT": str(free_port()), "PORT": str(free_port())}
    ended = run(f"{ROOT}/examples/vllm.sh {checkpoint}", shell, tmp_path)
    assert json.loads(ended.stdout)["choices"][0]["message"]["content"]
