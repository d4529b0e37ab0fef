"""Rows in a caller's hands: views, dtypes, and the check against what a prompt expects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from lm_adapter import (
    EncodedRows,
    Grid,
    InvalidRequest,
    InvalidRows,
    ServerInfo,
    check_rows,
)
from lm_adapter.checks import RowsHeader, check_header
from lm_adapter.testing import fake_model, fake_rows
from lm_adapter.types import Limits

VALUES = fake_rows(b"digest", 6, 8)


def payload_of(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype("<u2")).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(values.astype(dtype)).reshape(-1).view(np.uint8)


def make_rows(dtype: str = "float32", num_deepstack_levels: int = 3) -> EncodedRows:
    return EncodedRows(
        key=b"k" * 32,
        content_digest=b"d" * 32,
        grid_thw=Grid(1, 4, 6),
        num_rows=6,
        width=8,
        dtype=dtype,
        num_deepstack_levels=num_deepstack_levels,
        payload=payload_of(VALUES, dtype),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_views_show_the_same_values_in_every_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rows = make_rows(dtype)
    assert rows.numpy().dtype == np.float32
    np.testing.assert_array_equal(rows.numpy(), VALUES)
    assert rows.torch().dtype == getattr(torch, dtype)
    assert rows.torch().shape == (6, 8)
    np.testing.assert_array_equal(rows.torch().float().numpy(), VALUES)


def test_torch_and_float32_numpy_share_the_payloads_memory() -> None:
    pytest.importorskip("torch")
    rows = make_rows()
    assert isinstance(rows.payload, np.ndarray)
    rows.payload[:4] = np.frombuffer(np.float32(42.0).tobytes(), np.uint8)
    assert rows.torch()[0, 0] == 42.0
    assert rows.numpy()[0, 0] == 42.0
    assert make_rows("bfloat16").torch().data_ptr() != rows.torch().data_ptr()
    assert rows.torch().data_ptr() == rows.payload.ctypes.data


def check(rows: EncodedRows, **changes: object) -> None:
    expected: dict[str, object] = {
        "grid": (1, 4, 6),
        "width": 8,
        "dtype": "float32",
        "num_deepstack_levels": 3,
        "spatial_merge_size": 2,
        "merges_time": False,
    }
    check_rows(rows, **{**expected, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows_changes", "expected", "field_name"),
    [
        ({}, {"grid": (1, 6, 4)}, "grid_thw"),
        ({}, {"width": 16}, "width"),
        ({}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"num_deepstack_levels": 1}, "num_deepstack_levels"),
        ({}, {"spatial_merge_size": 1}, "num_rows"),
        ({"grid_thw": Grid(2, 4, 6)}, {"grid": (2, 4, 6)}, "num_rows"),
        ({"num_rows": 5}, {}, "num_rows"),
        ({"grid_thw": Grid(0, 4, 6)}, {"grid": (0, 4, 6)}, "grid_thw"),
        ({"payload": payload_of(VALUES, "float32")[:-4]}, {}, "rows_bytes"),
        ({"payload": payload_of(VALUES, "float32").repeat(2)}, {}, "rows_bytes"),
    ],
)
def test_p22_rows_that_a_prompt_does_not_expect_are_refused(
    rows_changes: dict[str, object], expected: dict[str, object], field_name: str
) -> None:
    rows = replace(make_rows(), **rows_changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRows) as caught:
        check(rows, **expected)
    assert caught.value.field == field_name
    assert caught.value.details["found"] in str(caught.value)


def test_rows_that_fit_pass() -> None:
    check(make_rows(), finite=True)
    check(make_rows("bfloat16"), dtype="bfloat16", finite=True)
    check(replace(make_rows(), grid_thw=Grid(3, 4, 6)), grid=(3, 4, 6), merges_time=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_p22_non_finite_elements_are_found_when_asked_for(dtype: str, bad: float) -> None:
    values = VALUES.copy()
    values[4, 7] = bad
    rows = replace(make_rows(dtype), payload=payload_of(values, dtype))
    check(rows, dtype=dtype)
    with pytest.raises(InvalidRows, match=r"1 of 48 elements .* row 4"):
        check(rows, dtype=dtype, finite=True)


def test_a_servers_model_is_found_by_name_or_alone() -> None:
    def info(*names: str) -> ServerInfo:
        models = tuple(replace(fake_model(), name=name) for name in names)
        return ServerInfo(1, 1, "1", "i", "cpu", models, Limits(), ())

    assert info("a", "b").model("b").name == "b"
    assert info("a").model().name == "a"
    with pytest.raises(InvalidRequest, match="2 models, needs 1; served: a, b"):
        info("a", "b").model()
    with pytest.raises(InvalidRequest, match="0 models"):
        info("a").model("c")


def test_p22_a_width_that_its_levels_do_not_divide_is_refused() -> None:
    """Also where no model is known that the width could be compared with."""
    sound = RowsHeader(Grid(1, 4, 4), 4, 96, "float32", 2, 4 * 96 * 4)
    check_header(sound)
    with pytest.raises(InvalidRows, match="width 98 is not a multiple of 3"):
        check_header(sound._replace(width=98, num_bytes=4 * 98 * 4))
