"""Whether an encoder serves the rows that the engine's model takes.

Owns what is compared, and the sentence that names both figures and the option to change. ``Settings.client``
compares every description of an encoder before it uses one; the client itself compares the versions of the
contract. What a start does with the answer is in ``first_contact``. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.settings import Settings
from lm_adapter.errors import InvalidRequest, ModelMismatch
from lm_adapter.types import ModelInfo, ServerInfo

ENCODER_DTYPES = ("float32", "bfloat16")
"""What the encoder's ``--dtype`` takes."""


@dataclass(frozen=True)
class Agreement:
    """What an engine asks of its encoder. geometry: the rows that its model takes."""

    settings: Settings
    geometry: Geometry

    def client(self, *, reads_rows: bool) -> AsyncVisionEncoderClient:
        """As ``Settings.client``. Calls of this client raise ModelMismatch while the encoder disagrees, and
        work as soon as one that agrees is at its address."""
        return self.settings.client(reads_rows=reads_rows, check_server=self.check)

    def check(self, target: str, info: ServerInfo) -> None:
        """target: the encoder's address. Raises ModelMismatch with the first difference."""
        engine, source = self.settings.ENGINE, self.settings.SOURCE
        try:
            model = info.model(self.settings.model)
        except InvalidRequest as error:
            raise ModelMismatch(f"the encoder at {target}: {error.message}: set model in {source}") from error
        geometry = self.geometry
        for text, found, expected in (
            ("of the family {}", model.family, geometry.family),
            ("with {} deepstack levels", model.num_deepstack_levels, geometry.num_levels),
            ("of {} elements", model.width, geometry.width),
            ("in {}", model.dtype, geometry.dtype),
        ):
            if found != expected:
                raise ModelMismatch(
                    f"the encoder at {target} serves rows {text.format(found)}, {engine}'s model takes "
                    f"{expected}: {self._remedy(model)}",
                    details={"found": found, "expected": expected},
                )

    def _remedy(self, model: ModelInfo) -> str:
        engine, dtype = self.settings.ENGINE, self.geometry.dtype
        facts = model.family, model.num_deepstack_levels, model.width
        if facts != (self.geometry.family, self.geometry.num_levels, self.geometry.width):
            return (
                f"start the encoder, which has {model.name}, with {engine}'s checkpoint as its --model, or "
                f"set target in {self.settings.SOURCE} to an encoder that has it"
            )
        ways = [f"the encoder with --dtype {dtype}"] if dtype in ENCODER_DTYPES else []
        if model.dtype in self.settings.DTYPES:
            ways.append(f"{engine} with --dtype {model.dtype}")
        return f"start {', or '.join(ways)}"
