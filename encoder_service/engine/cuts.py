"""The cut of a staged batch, captured once per bucket.

Owns those graphs. A kernel's launch from Python costs tens of microseconds, a replay a few, and all that
differs between batches is in the bucket's static buffers. They are apart from the towers' graphs, which
serve callers whose patches come from elsewhere too. Without graphs, as on a CPU, the cutter does it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import Cutter, KernelCutter, StagedBatch
from encoder_service.engine.staging import PixelSlot, StagedPixels, UploadRows
from encoder_service.scheduler.buckets import Bucket
from encoder_service.types import TowerItem


class StagedCuts:
    """Writes the patches of staged batches into the buffers that the runner's graphs read. memory: uint8,
    that of all pixel slots."""

    def __init__(self, runner: GraphRunner, cutter: Cutter, memory: torch.Tensor) -> None:
        self._runner = runner
        self._cutter = cutter
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        if runner.captures and isinstance(cutter, KernelCutter):
            self._capture(cutter, memory)

    def write(
        self,
        bucket: Bucket,
        items: Sequence[TowerItem],
        slot: PixelSlot,
        rows: UploadRows,
        held: list[torch.Tensor],
    ) -> None:
        """Every patch of the bucket, in the compute stream; padding becomes zeros. The batch's table and
        sources are in place. held: what was transferred, item by item."""
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
            return
        static, cutter = self._runner.static(bucket), self._cutter
        staged = StagedPixels.of(slot, rows, held)
        batch = StagedBatch(items, staged, static.table_I5, static.sources_I2)
        self._runner.streams.compute.run(lambda: cutter.cut_staged(batch, static.pixels))

    def _capture(self, cutter: KernelCutter, memory: torch.Tensor) -> None:
        device = memory.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        buckets = self._runner.ladder.buckets
        with torch.cuda.stream(stream):
            # Compiles. An item without frames: all that this writes is zeros.
            table_I5 = torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32, device=device)
            sources_I2 = torch.zeros(1, 2, dtype=torch.int64, device=device)
            for bucket in buckets:
                cutter.cut_table(memory, table_I5, sources_I2, self._runner.static(bucket).pixels)
            stream.synchronize()
            gc.collect()  # what it frees on the device would end a capture
            for bucket in buckets:
                static = self._runner.static(bucket)
                graph = torch.cuda.CUDAGraph()
                # Not torch.cuda.graph, which collects garbage and empties the cache each time.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    cutter.cut_table(memory, static.table_I5, static.sources_I2, static.pixels)
                finally:
                    graph.capture_end()
                self._graphs[bucket] = graph
        torch.cuda.current_stream(device).wait_stream(stream)
