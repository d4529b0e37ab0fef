"""The rows that a language model takes: how many, how wide, and in which dtype.

Reads the ModelConfig of an engine by attribute. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lm_adapter.checks import check_rows
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.items import Grid
from lm_adapter.types import ITEMSIZE_BYTES, ROW_DTYPES, EncodedRows


class TextModelConfig(Protocol):
    """What is read of the ModelConfig of an engine. hf_config: transformers' configuration of the model.
    dtype: a torch.dtype, or its name."""

    hf_config: Any
    dtype: Any


@dataclass(frozen=True)
class Geometry:
    """family: of the tower. width: elements of a row, D * (1 + num_levels). check_finite: ``check`` looks for
    NaN and infinity."""

    family: str
    width: int
    dtype: str
    num_levels: int
    merge_size: int
    merges_time: bool
    check_finite: bool = False

    @classmethod
    def of_model(cls, model_config: TextModelConfig, *, check_finite: bool = False) -> Geometry:
        """Raises InvalidRequest for other families and dtypes."""
        config = model_config.hf_config
        interface = vision_interface(config.to_dict())
        dtype = str(model_config.dtype).removeprefix("torch.")
        if dtype not in ROW_DTYPES:
            raise InvalidRequest(f"the model runs in {dtype}, rows come in {', '.join(ROW_DTYPES)}")
        levels = interface.num_deepstack_levels
        return cls(
            family=interface.family,
            width=config.get_text_config().hidden_size * (1 + levels),
            dtype=dtype,
            num_levels=levels,
            merge_size=interface.merge_size,
            merges_time=interface.merges_time,
            check_finite=check_finite,
        )

    def num_rows(self, grid: Grid) -> int:
        """Visual tokens of one item of this grid."""
        return grid.num_rows(self.merge_size, merges_time=self.merges_time)

    def num_bytes(self, grid: Grid) -> int:
        return self.num_rows(grid) * self.width * ITEMSIZE_BYTES[self.dtype]

    def check(self, rows: EncodedRows, grid: Grid) -> None:
        """Raises InvalidRows unless the rows fit the model and a prompt with this grid."""
        check_rows(
            rows,
            grid=grid,
            width=self.width,
            dtype=self.dtype,
            num_deepstack_levels=self.num_levels,
            spatial_merge_size=self.merge_size,
            merges_time=self.merges_time,
            finite=self.check_finite,
        )
        num_rows = self.num_rows(grid)
        if rows.num_rows != num_rows:  # a clip of several chunks has more
            raise InvalidRows(
                "num_rows",
                f"the result has {rows.num_rows} rows, the prompt {num_rows} placeholders",
                found=rows.num_rows,
                expected=num_rows,
            )
