"""Attention over packed sequences: the protocol (``backend.py``), one file per backend, and the choice."""

from encoder_service.towers.attention.available import available_backends, parse_attention
from encoder_service.towers.attention.backend import AttentionBackend, AttentionPlan, SequenceBounds
from encoder_service.towers.attention.sdpa import SdpaAttention

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "SdpaAttention",
    "SequenceBounds",
    "available_backends",
    "parse_attention",
]
