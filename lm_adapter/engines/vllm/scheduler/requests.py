"""The state of one request: which of its rows it holds, and which it waits for.

Owns the facts of a request and how they change. Nothing here calls anything: ``tracker`` decides, and
``rows`` and ``room`` carry out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from lm_adapter.engines.vllm.scheduler.items import RequestItem, VllmRequest
from lm_adapter.engines.vllm.scheduler.rows import Holder, RowsEntry


@dataclass(eq=False)
class RequestState:
    """replies: the addresses to which its failure is reported. held: rows by index of the feature. needed:
    features whose rows the request queues for, in the order of the prompt. queued_s: when it began to.
    waits_since_s: since when vLLM has been told to wait with its next step, None if it was not.
    was_looked_up: its rows were looked up in vLLM's own cache. was_in_step: a step has computed with its
    rows. end: of the tokens of its last item."""

    vllm_request: VllmRequest
    replies: set[str] = field(default_factory=set)
    items: list[RequestItem] = field(default_factory=list)
    held: dict[int, RowsEntry] = field(default_factory=dict)
    needed: deque[int] = field(default_factory=deque)
    queued_s: float = 0.0
    waits_since_s: float | None = None
    was_looked_up: bool = False
    was_in_step: bool = False
    has_failed: bool = False
    end: int = 0

    @property
    def request_id(self) -> str:
        return self.vllm_request.request_id

    @property
    def has_kv_blocks(self) -> bool:
        """As vLLM counts it: it runs, or a KV connector loads, or has loaded, a part of it."""
        has_status = self.vllm_request.status.name in ("RUNNING", "WAITING_FOR_REMOTE_KVS")
        return has_status or bool(self.vllm_request.num_computed_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether it is, or was, in a step: others may wait for what it has."""
        return self.was_in_step or self.has_kv_blocks

    @property
    def known(self) -> set[int]:
        """Features whose rows it holds or queues for."""
        return {*self.held, *self.needed}

    def holder(self, index: int) -> Holder:
        return self.request_id, index

    def is_past(self, num_features: int, num_computed_tokens: int) -> bool:
        """Whether all of its items are computed, and none of their rows are held. num_features: of vLLM's
        request, to which some may have been added."""
        has_more = num_computed_tokens < self.end or num_features != len(self.items)
        return not (has_more or self.held or self.needed or self.has_failed)

    def has_items(self, items: list[RequestItem]) -> None:
        self.items = items
        self.end = max((item.end for item in items), default=0)

    def ahead(self, num_computed_tokens: int) -> list[int]:
        """Features with tokens that are not computed."""
        return [index for index, item in enumerate(self.items) if item.end > num_computed_tokens]

    def in_step(self, ahead: Iterable[int], end: int) -> list[int]:
        """Those of ``ahead`` that a step which ends before this token computes with."""
        return [index for index in ahead if self.items[index].start < end]

    def need(self, features: Collection[int]) -> None:
        """Queues for the rows of these features that it does not hold."""
        self.needed = deque(index for index in features if index not in self.held)

    def need_no_more(self, features: Collection[int]) -> None:
        self.needed = deque(index for index in self.needed if index not in features)

    def needed_items(self) -> list[RequestItem]:
        return [self.items[index] for index in self.needed]

    def got_next(self, entry: RowsEntry) -> None:
        """Holds the rows of the feature that it needs first."""
        self.held[self.needed.popleft()] = entry

    def are_present(self, features: Iterable[int]) -> bool:
        """Whether every rank has the rows of these features, and it holds them."""
        return all(index in self.held and self.held[index].is_present for index in features)
