"""Encoders, a prefill worker and SMG gateways for three models, on the CPU.

Collected only where SMG is installed: `make test-tokenspeed` runs this folder in its own environment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.families import REPRESENTATIVE

if importlib.util.find_spec("smg") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from bench.harness.tokenspeed import Encoder, Gateway, PrefillWorker
    from encoder_service.checkpoints.synthetic import make_checkpoint

# How the gateway sends pixels, and the dtype of pixels and rows.
WAYS = {"qwen3_vl": "auto", "qwen3_5": "inline", "kimi_k25": "auto"}
DTYPES = {"qwen3_vl": "float32", "qwen3_5": "float32", "kimi_k25": "bfloat16"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in REPRESENTATIVE:
        make_checkpoint(root / family, family, "tiny", 3, with_lm=True)
    return {family: root / family for family in REPRESENTATIVE}


@pytest.fixture(scope="session")
def prefill(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefillWorker]:
    """One process with TokenSpeed's receiver, a prefill and a decode worker of each family."""
    with PrefillWorker(checkpoints, tmp_path_factory.mktemp("prefill")) as running:
        yield running


@pytest.fixture(scope="session")
def gateways(
    checkpoints: dict[str, Path], prefill: PrefillWorker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Gateway]]:
    """A gateway of each family, with one encoder; Qwen3-VL's has two."""
    folder = tmp_path_factory.mktemp("gateways")
    found: dict[str, Gateway] = {}
    encoders: list[Encoder] = []
    try:
        for family, checkpoint in checkpoints.items():
            logs = [folder / f"{family}-{index}.log" for index in range(1 + (family == "qwen3_vl"))]
            of_family = [Encoder(checkpoint, DTYPES[family], log) for log in logs]
            encoders += of_family
            found[family] = Gateway(
                family, checkpoint, WAYS[family], of_family, prefill, folder / f"{family}.log"
            )
        prefill.wait_ready()
        for encoder in encoders:
            encoder.wait_ready()
        for gateway in found.values():
            gateway.start()
        for gateway in found.values():
            gateway.wait_ready()
        yield found
    finally:
        processes: list[Gateway | Encoder] = [*found.values(), *encoders]
        for process in processes:
            process.kill()
