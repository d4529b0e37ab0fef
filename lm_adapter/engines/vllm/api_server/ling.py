"""vLLM's parser and processor of Ling-3.0-VL for undecoded files, as ``processor`` for Qwen.

Images only, as vLLM's own. vLLM's own code puts the placeholders into the prompt, with the line break that
follows each image.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import bailing_moe_v3_vl as ling

from lm_adapter.engines.vllm.api_server.parser import ImageFileParser
from lm_adapter.engines.vllm.api_server.processor import (
    Factory,
    FileDummyInputsBuilder,
    FileProcessing,
    choice,
)


class LingFileInfo(ling.BailingMoeV3VLProcessingInfo):  # type: ignore[misc]
    def get_data_parser(self) -> Any:
        return ImageFileParser()


class LingFileDummyInputs(ling.BailingMoeV3VLDummyInputsBuilder):  # type: ignore[misc]
    """The largest image, without a file: the encoder is not asked."""

    _get_dummy_images = FileDummyInputsBuilder._get_dummy_images


class LingFileProcessor(FileProcessing, ling.BailingMoeV3VLMultiModalProcessor):  # type: ignore[misc]
    pass


def factories(_theirs: Any, _architecture: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. Arguments as in ``processor``."""
    return (
        choice(LingFileProcessor, ling.BailingMoeV3VLMultiModalProcessor),
        choice(LingFileInfo, ling.BailingMoeV3VLProcessingInfo),
        choice(LingFileDummyInputs, ling.BailingMoeV3VLDummyInputsBuilder),
    )
