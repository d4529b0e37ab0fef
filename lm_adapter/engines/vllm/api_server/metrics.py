"""The plugin's metrics in vLLM's ``/metrics``.

Owns their names, labels and buckets. vLLM gives their classes (its Ray deployments have others), the labels
that all of its metrics have (``model_name``, ``engine``), and the records of ``stats``. Imports no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from lm_adapter.engines.vllm.stats import BYTES, FAILURES, HITS, LOST_READS, QUERIES, WAITS
from lm_adapter.errors import (
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    ModelMismatch,
    ProtocolMismatch,
    RequestRefused,
)
from lm_adapter.shm.attachment import TRANSPORTS

WAIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTERS = {
    BYTES: (
        "vllm:vision_encoder_rows_bytes",
        "Bytes of image and clip rows that came from the vision encoder, each item once for all ranks.",
        ["transport"],
    ),
    QUERIES: (
        "vllm:vision_encoder_cache_queries",
        "Images and clips of requests whose rows were looked up in vLLM's cache of encoder outputs.",
        [],
    ),
    HITS: (
        "vllm:vision_encoder_cache_hits",
        "Images and clips of requests whose rows were all in vLLM's cache of encoder outputs.",
        [],
    ),
    LOST_READS: (
        "vllm:vision_encoder_lost_reads",
        "Images and clips whose rows the vision encoder evicted before they were copied; they came again.",
        [],
    ),
    FAILURES: (
        "vllm:vision_encoder_failures",
        "Requests rejected because they got no rows of an image or clip.",
        ["reason"],
    ),
}
"""By the record's names: name, documentation, and the label that it has beside vLLM's own."""
MAX_REASONS = 64
REASON = re.compile("[A-Z][A-Z_]{1,39}")
"""What an encoder's reasons look like. Others, and those beyond MAX_REASONS, are counted as OTHER_REASON."""
OTHER_REASON = "OTHER"
USUAL_REASONS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "OVERLOADED", "INVALID_ROWS", OTHER_REASON)
ANSWERS = (RequestRefused, EncoderOverloaded, EncoderFault, ModelMismatch, ProtocolMismatch)
"""Errors that an encoder states. By all others it was not reached, or could not be asked."""


class EncoderMetrics:
    """Of one API server, for each of its engines; vLLM's ``ECConnectorPromMetrics``."""

    def __init__(
        self,
        metric_types: Mapping[type, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        """metric_types: by the class of prometheus_client."""
        self._engines = per_engine_labelvalues
        self._reasons: set[str] = set()
        self._wait = metric_types[Histogram](
            name="vllm:vision_encoder_rows_wait_seconds",
            documentation="Time for which requests waited for rows of images and clips that they got.",
            buckets=WAIT_BUCKETS_S,
            labelnames=labelnames,
        )
        self._reachable = metric_types[Gauge](
            name="vllm:vision_encoder_reachable",
            documentation="1 if the vision encoder answered when it was asked last, else 0.",
            labelnames=labelnames,
            # Of several API servers, 0 if one of them does not reach it.
            multiprocess_mode="livemin",
        )
        self._counters = {
            key: metric_types[Counter](name=name, documentation=text, labelnames=[*labelnames, *own])
            for key, (name, text, own) in COUNTERS.items()
        }
        # A rate needs the 0 before the first event.
        for labels in self._engines.values():
            self._wait.labels(*labels)
            for key in (QUERIES, HITS, LOST_READS):
                self._counters[key].labels(*labels)
            for transport in TRANSPORTS:
                self._counters[BYTES].labels(*labels, transport)
            for reason in USUAL_REASONS:
                self._counters[FAILURES].labels(*labels, reason)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """transfer_stats_data: ``RowStats.data`` of one of the engines."""
        labels = self._engines[engine_idx]
        for seconds in transfer_stats_data.get(WAITS, ()):
            self._wait.labels(*labels).observe(seconds)
        for key, counter in self._counters.items():
            for label, number in transfer_stats_data.get(key, {}).items():
                own = [self._known(label) if key == FAILURES else label] if COUNTERS[key][2] else []
                counter.labels(*labels, *own).inc(number)

    def failed(self, error: EncoderError) -> None:
        """This process rejected a request, before any engine had it. It counts for the first engine."""
        self.observe({FAILURES: {error.reason: 1}}, min(self._engines))

    def asked(self, error: EncoderError | None) -> None:
        """error: why the encoder did not describe itself; None if it did."""
        for labels in self._engines.values():
            self._reachable.labels(*labels).set(error is None or isinstance(error, ANSWERS))

    def _known(self, reason: str) -> str:
        """The reason, as a label with a bounded number of values."""
        if reason not in self._reasons:
            if len(self._reasons) >= MAX_REASONS or not REASON.fullmatch(reason):
                return OTHER_REASON
            self._reasons.add(reason)
        return reason
