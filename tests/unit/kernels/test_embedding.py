"""Interpolated positions against the plain path's taps, and the norm after them."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import embed_norm
from encoder_service.towers.layers import TAPS, PositionMode, interpolate_positions
from encoder_service.towers.positions import grid_taps, raster_coordinates
from tests.unit.kernels.references import EPS, assert_near, norm_float32, padded_rows, randn

TABLE_HEIGHT, TABLE_WIDTH = 9, 7
# Below, at, above the table's sides; one patch.
FRAMES = [(2, 2), (1, 7), (1, 1), (11, 1)]


def frame_coords(height: int, width: int) -> torch.Tensor:
    rows, columns = raster_coordinates(height, width)
    sizes = torch.tensor([height, width]).expand(height * width, 2)
    return torch.cat([rows[:, None], columns[:, None], sizes], dim=1).int()


def plain_positions(table: torch.Tensor, height: int, width: int, mode: PositionMode) -> torch.Tensor:
    taps = TAPS[mode]
    index, weight = grid_taps(taps(height, TABLE_HEIGHT), taps(width, TABLE_WIDTH), TABLE_WIDTH)
    return interpolate_positions(table, index, weight)


@pytest.mark.parametrize(
    ("mode", "frames", "width", "dtype", "is_clip"),
    [
        ("linear", FRAMES, 64, torch.float32, False),
        ("cubic", FRAMES, 64, torch.float32, False),
        ("centred_linear", FRAMES, 64, torch.float32, False),
        ("linear", FRAMES[:1], 1152, torch.bfloat16, False),
        ("cubic", FRAMES[:1], 1152, torch.bfloat16, False),
        ("cubic", [(2, 3)] * 3, 144, torch.bfloat16, True),
    ],
)
def test_positions_and_temporal_rows_equal_the_plain_path(
    mode: PositionMode,
    frames: list[tuple[int, int]],
    width: int,
    dtype: torch.dtype,
    is_clip: bool,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    coords = torch.cat([frame_coords(*frame) for frame in frames])
    table = randn(generator, TABLE_HEIGHT * TABLE_WIDTH, width).to(dtype)
    positions = torch.cat([plain_positions(table, *frame, mode) for frame in frames])
    temporal: dict[str, torch.Tensor] = {}
    if is_clip:
        index = torch.arange(len(frames), dtype=torch.int32).repeat_interleave(len(coords) // len(frames))
        temporal = {"frame_table": randn(generator, 5, width), "frame_index": index}
        positions = positions + temporal["frame_table"][index.long()]
    x = randn(generator, len(coords), width).to(dtype)
    weight, bias = (randn(generator, width).to(dtype) for _ in range(2))
    held = padded_rows(x, device)
    h = embed_norm(
        held,
        table.to(device),
        coords.to(device),
        weight.to(device),
        bias.to(device),
        EPS,
        mode=mode,
        table_height=TABLE_HEIGHT,
        table_width=TABLE_WIDTH,
        **{name: tensor.to(device) for name, tensor in temporal.items()},
    )
    assert_near(held, x.float() + positions)
    assert_near(h, norm_float32(held.cpu(), weight, bias, EPS))


@pytest.mark.parametrize("table_size", [pytest.param(48, marks=pytest.mark.extended), 64])
@pytest.mark.parametrize("mode", TAPS)
def test_every_side_has_the_plain_taps(mode: PositionMode, table_size: int, device: torch.device) -> None:
    """Short sides and a few positions of long ones, against the same float32 steps. A table of one-hot rows
    shows each tap's entry and weight: a position on a whole entry must not move to its neighbour."""
    positions = [(side, position) for side in (1, 2, 3, 5, 7) for position in range(side)]
    positions += [(side, position) for side in (48, 64, 95, 127) for position in (1, side // 3, side - 1)]
    coords = torch.tensor([[0, position, 1, side] for side, position in positions], dtype=torch.int32)
    x, ones = torch.zeros(len(positions), table_size, device=device), torch.ones(table_size, device=device)
    embed_norm(
        x,
        torch.eye(table_size, device=device),
        coords.to(device),
        ones,
        ones,
        EPS,
        mode=mode,
        table_height=1,
        table_width=table_size,
    )
    for found, (side, position) in zip(x.cpu(), positions, strict=True):
        index, weight = TAPS[mode](side, table_size)
        expected = torch.zeros(table_size).index_add_(0, index[position], weight[position])
        assert (found - expected).abs().max() < 1e-6, (side, position)
