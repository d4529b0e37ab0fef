"""Rows on one rank: the connector's half in a worker of vLLM.

Owns how rows enter and leave vLLM's cache. ``shared.rank_reader`` reads them; the scheduler orders the reads,
and bounds the bytes that are held.
"""

from __future__ import annotations

import logging
from typing import Any

from lm_adapter.engines.shared import rank_reader
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.engines.vllm.step_rows import StepRows

logger = logging.getLogger("vllm.vision_encoder")


class RankReader(rank_reader.RankReader):
    """``begin_step`` is for the worker's thread."""

    def __init__(self, settings: Settings, geometry: Geometry, device: Any, socket_name: str) -> None:
        max_bytes = settings.max_resident_bytes
        super().__init__(settings, geometry, device, socket_name, max_bytes=max_bytes, logger=logger)

    def begin_step(self, step: StepRows, encoder_cache: dict[str, Any]) -> None:
        """Puts rows that this rank has confirmed into vLLM's cache."""
        for number, identifier in step.hand_over:
            tensor = self.rows[number]
            if tensor.is_cuda:
                import torch

                # Its memory was allocated on the reader's stream, and is read on this one.
                tensor.record_stream(torch.cuda.current_stream())
            encoder_cache[identifier] = tensor
        for number in step.drop:
            self.rows.pop(number, None)
