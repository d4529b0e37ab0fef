"""Libraries that multiply, on a GPU: every step that a candidate is tried for, against float32."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.gemm import STEPS, TORCH_GEMM, Step
from encoder_service.towers.gemm.available import available_gemms
from encoder_service.towers.gemm.cases import TOLERANCE, make_trial
from encoder_service.towers.layers import BlockShape
from tests.parity.tower_cases import fresh_seed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
# Below a tile, in the middle of one, and as many rows as proj, qkv and fc1 have outputs: quack cannot tell a
# vector over rows from one over outputs by its shape then.
NUM_ROWS = (4, 1100, 1152, 3456, 4304)


@pytest.mark.parametrize("layout", ["blocked", "interleaved"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("step", STEPS)
def test_every_candidate_is_as_near_to_float32_as_torch(step: Step, num_rows: int, layout: str) -> None:
    candidates = [gemm for gemm in available_gemms(CUDA)[1:] if step in gemm.steps]
    if not candidates:
        pytest.skip("torch is the only gemm here")
    torch.manual_seed(fresh_seed())
    shape = BlockShape(1152, 4304, 16, 72, 10_000.0, layout)  # type: ignore[arg-type]
    trial = make_trial(step, shape, num_rows, torch.bfloat16, CUDA)
    torch_error = trial.error(TORCH_GEMM)
    assert torch_error < TOLERANCE
    for gemm in candidates:
        error = trial.error(gemm)
        print(f"{step} {num_rows} {gemm.name}: {error:.2e}, torch {torch_error:.2e}")
        assert error < 1.5 * torch_error
