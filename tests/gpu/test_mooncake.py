"""The buffer that rows of a GPU are sent from. The engine is a stand-in; no test machine has RDMA."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.config import parse_settings
from encoder_service.protocols.tokenspeed.mooncake import Mooncake

pytestmark = pytest.mark.gpu
SIZE_BYTES = 1 << 20


class Engine:
    """Mooncake's engine. can_register_device: as a build for CUDA can, with the host's driver for it."""

    can_register_device = True

    def __init__(self) -> None:
        self.registered: list[int] = []

    def initialize(self, *_: str) -> int:
        return 0

    def get_local_topology(self) -> str:
        return '{"cuda:0": [["mlx5_0"], []]}'

    def register_memory(self, address: int, num_bytes: int) -> int:
        assert num_bytes == SIZE_BYTES
        self.registered.append(address)
        return 0 if self.can_register_device or len(self.registered) > 1 else -1


@pytest.mark.parametrize(
    ("rdma", "can_register_device", "on_device"),
    [("mlx5_0", True, True), ("mlx5_0", False, False), ("", False, False)],
    ids=["device memory registered", "device memory refused", "tcp"],
)
def test_rows_of_a_gpu_are_staged(
    rdma: str, can_register_device: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over RDMA in device memory, if Mooncake takes it; else in pinned memory of the host."""
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(Engine, "can_register_device", can_register_device)
    given: dict[str, Any] = {
        "serve_tokenspeed": "127.0.0.1:0",
        "tokenspeed_send_bytes": SIZE_BYTES,
        "tokenspeed_rdma": rdma,
    }
    device = torch.device("cuda", torch.cuda.current_device())
    mooncake = Mooncake(parse_settings(model=Path("/m"), **given), device)
    rows = torch.randn(100, 3 * 64, device=device)
    torch.cuda.synchronize(device)  # rows are staged after their event

    async def staged() -> tuple[torch.Tensor, torch.Tensor]:
        async with mooncake.staged(rows, 64, torch.bfloat16, "10.0.0.1") as found:
            return found.main.cpu(), found.deepstack.cpu()

    main, deepstack = asyncio.run(staged())
    mooncake.close()
    assert torch.equal(torch.cat([main, deepstack], 1), rows.bfloat16().cpu())
    buffer = mooncake._buffer
    assert (buffer.is_cuda, buffer.is_cuda or buffer.is_pinned()) == (on_device, True)
    (engine,) = mooncake._engines.values()
    assert (buffer.data_ptr() in engine.registered) == bool(rdma)
