"""The buffer that rows of a GPU are sent from. The engine is a stand-in; no test machine has RDMA."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.unit.protocols.mooncake_engine import fake_mooncake
from tests.unit.protocols.test_mooncake import SIZE_BYTES, new_mooncake

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rdma", "num_refused", "on_device"),
    [("mlx5_0", 0, True), ("mlx5_0", 1, False), ("", 0, False)],
    ids=["device memory registered", "device memory refused", "tcp"],
)
def test_rows_of_a_gpu_are_staged(rdma: str, num_refused: int, on_device: bool) -> None:
    """Over RDMA in device memory, if Mooncake registers it; else in pinned memory of the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.randn(100, 3 * 64, device=device)
    torch.cuda.synchronize(device)  # rows are staged after their event

    async def staged_rows() -> torch.Tensor:
        async with mooncake.staged(rows, 64, torch.bfloat16, "10.0.0.1") as staged:
            main, deepstack = staged.main, staged.deepstack
            assert (main.is_cuda, main.is_cuda or main.is_pinned()) == (on_device, True)
            assert fake.registered == ([(main.data_ptr(), SIZE_BYTES)] if rdma else [])
            return torch.cat([main, deepstack], 1).cpu()

    with fake_mooncake() as fake:
        fake.num_refused_registrations = num_refused
        mooncake = new_mooncake(device, tokenspeed_rdma=rdma)
        assert torch.equal(asyncio.run(staged_rows()), rows.bfloat16().cpu())
        mooncake.close()
