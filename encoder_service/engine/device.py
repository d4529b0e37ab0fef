"""The device engine: one thread that owns the device and runs one batch after another.

Owns the tower's forward passes, the transfers around them and what happens when one fails. Leaves the
choice of batches to the planner and everything about requests to the pipeline.

A batch that fails is split and retried, so that one poisoned item fails alone. A fault of the device
itself fails everything that waits, once, with a retryable error, and is reported to the owner, which takes
the process out of service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import Cancelled, DeadlineExceeded, DeviceFault, Draining, InternalError
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.metrics import Metrics
from encoder_service.scheduler.planner import Plan, Planner, Ticket
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, Grid, TowerItem

log = structlog.get_logger(__name__)

# cudaErrorInvalidValue, cudaErrorMemoryAllocation (pinned memory too), cudaErrorInvalidConfiguration: the
# call was refused, the context lives on. A lost context answers the next call with its own code.
CUDA_CODES_OF_ONE_CALL = frozenset({1, 2, 9})


@dataclass(frozen=True)
class TowerResult:
    """One item's rows on the host, owning their storage, and what its batch cost: when it started, in the
    engine's clock, and how long it took."""

    rows: torch.Tensor
    started_s: float
    tower_ms: float


@dataclass(eq=False)
class Job:
    """One item on its way through the device; ``future`` is completed on the engine's thread."""

    item: TowerItem
    ticket: Ticket
    future: Future[TowerResult] = field(default_factory=Future)


@dataclass
class EngineCounters:
    batches: int = 0
    items: int = 0
    patches: int = 0
    retried_batches: int = 0
    failed_items: int = 0
    dropped_items: int = 0
    busy_s: float = 0.0


class DeviceEngine:
    """The one thread that touches the device.

    clock: seconds, monotonic, the one that deadlines are in. on_fault: called once, on the engine's
    thread, when the device failed. graphs: runs batches on the fast path; without it the tower does, plain.
    """

    def __init__(
        self,
        tower: Tower,
        preprocessor: Preprocessor,
        planner: Planner,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        on_fault: Callable[[DeviceFault], None],
        num_threads: int = 0,
        graphs: GraphRunner | None = None,
    ) -> None:
        self._tower = tower
        self._preprocessor = preprocessor
        self._planner = planner
        self._metrics = metrics
        self._clock = clock
        self._on_fault = on_fault
        self._num_threads = num_threads
        self.graphs = graphs
        self._device = tower.device
        self._jobs: dict[Ticket, Job] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._fault: DeviceFault | None = None
        self._running: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="device-engine", daemon=True)
        self.counters = EngineCounters()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finishes the running batch, refuses what waits, joins the thread. False if it did not end within
        ``timeout_s``. Blocks; also right for an engine that never started."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._abandon(Draining("the service stopped before the item ran"))
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def fault(self) -> DeviceFault | None:
        return self._fault

    @property
    def queued_patches(self) -> int:
        with self._wake:
            return self._planner.num_patches

    @property
    def queued_items(self) -> int:
        with self._wake:
            return len(self._planner)

    def submit(self, item: TowerItem, ticket: Ticket) -> Future[TowerResult]:
        """Queues an item. The future ends with its rows, or Cancelled, DeadlineExceeded, Draining,
        DeviceFault or InternalError. Raises DeviceFault when the device has failed already, Draining when
        the engine is stopping."""
        job = Job(item, ticket)
        with self._wake:
            if self._fault is not None:
                raise self._fault
            if self._stopping:
                raise Draining("the engine is stopping and takes no new work")
            job.future.set_running_or_notify_cancel()  # from here on only the engine completes it
            self._jobs[ticket] = job
            self._planner.add(ticket)
            self._wake.notify()
        return job.future

    def discard(self, ticket: Ticket) -> None:
        """Drops an item that nobody waits for, at once, so that its pixels do not outlive its permit behind
        a long batch. Does nothing for an item that runs already or has ended."""
        with self._wake:
            job = self._jobs.pop(ticket, None)
            if job is None:
                return
            self._planner.remove(ticket)
            self.counters.dropped_items += 1
        job.future.set_exception(Cancelled("every caller left before the item ran"))

    def warm_up(self, grids: Sequence[Grid]) -> None:
        """Runs zeros of the given grids once, on the caller's thread, before ``start``."""
        self._choose_device()
        for grid in grids:
            pixels = torch.zeros(grid.num_patches, self._tower.patch_dim)
            with torch.inference_mode():
                self._forward([grid], [pixels])

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a defect of the loop itself: nobody would serve the queue any more
            log.exception("the engine's thread failed")
            self._fail(DeviceFault(f"the engine's thread failed: {first_line(error)}"))

    def _choose_device(self) -> None:
        """Makes the tower's GPU this thread's current one: streams, pinned memory and kernels that are
        launched by hand would otherwise go to the first."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _loop(self) -> None:
        self._choose_device()
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or len(self._planner))
                    if self._stopping:
                        break
                    plan = self._planner.next_batch(self._clock())
                    batch = [self._jobs.pop(ticket) for ticket in plan.batch]
                    dropped = self._take_dropped(plan)
                    self.counters.dropped_items += len(dropped)
                    self._running = batch
                for job, error in dropped:
                    job.future.set_exception(error)
                try:
                    self._run_batch(batch)
                except DeviceFault as fault:
                    self._fail(fault)
                    return
                # Not in a finally: after a defect, what ran is still to be told.
                self._running = []
                del batch, plan, dropped
        self._abandon(Draining("the service stopped before the item ran"))

    def _take_dropped(self, plan: Plan) -> list[tuple[Job, Exception]]:
        return [
            (self._jobs.pop(ticket), Cancelled("every caller left before the item ran"))
            for ticket in plan.cancelled
        ] + [
            (self._jobs.pop(ticket), DeadlineExceeded("the deadline passed before the item ran"))
            for ticket in plan.expired
        ]

    def _run_batch(self, batch: list[Job]) -> None:
        """Runs a batch; on failure its halves; a single item's failure is its own."""
        if not batch:
            return
        started_s = self._clock()
        grids = [job.item.grid for job in batch]
        failure = ""
        try:
            rows = self._forward(grids, [self._pixels(job.item) for job in batch])
        except Exception as error:
            if is_device_fault(error):
                raise DeviceFault(f"the device failed: {first_line(error)}") from error
            failure = first_line(error)
        # Outside the handler: the exception's traceback holds the failed batch's tensors, and halves that
        # should fit after running out of memory would not.
        if failure and len(batch) > 1:
            self.counters.retried_batches += 1
            log.warning("batch failed, retrying its halves", items=len(batch), error=failure)
            middle = len(batch) // 2
            self._run_batch(batch[:middle])
            self._run_batch(batch[middle:])
            return
        if failure:
            self.counters.failed_items += 1
            log.error("item failed in the tower", grid=tuple(grids[0]), error=failure)
            batch[0].future.set_exception(InternalError(f"the tower failed: {failure}"))
            return
        tower_s = self._clock() - started_s
        num_patches = sum(grid.num_patches for grid in grids)
        self.counters.batches += 1
        self.counters.items += len(batch)
        self.counters.patches += num_patches
        self.counters.busy_s += tower_s
        self._metrics.batch_patches.observe(num_patches)
        for job, item_rows in zip(batch, rows, strict=True):
            job.future.set_result(TowerResult(item_rows, started_s, tower_s * 1e3))

    def _pixels(self, item: TowerItem) -> torch.Tensor:
        """An item's patches on the device, [P, patch_dim]: uint8 frames travel, patches are cut there."""
        if isinstance(item, FrameItem):
            return self._preprocessor.patchify(item.frames_THWC.to(self._device))
        return item.pixel_values

    def _forward(self, grids: list[Grid], pixels: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of each item, on the host, each owning its storage."""
        tower = self._tower
        rows: torch.Tensor
        if self.graphs is not None:
            rows = self.graphs.run(self.graphs.prepare(grids), pixels)
        else:
            pixel_values = torch.cat([patches.to(self._device, tower.dtype) for patches in pixels])
            inputs = tower.prepare(grids).to(self._device).with_pixels(pixel_values)
            rows = tower(inputs)
        counts = [tower.num_rows(grid) for grid in grids]
        if rows.shape != (sum(counts), tower.width):
            raise InternalError(
                f"the tower gave {tuple(rows.shape)} rows, grids need {(sum(counts), tower.width)}"
            )
        if rows.is_cuda:
            staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            staged.copy_(rows, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            rows = staged
        return [item_rows.clone() for item_rows in rows.split(counts)]  # type: ignore[no-untyped-call]

    def _fail(self, fault: DeviceFault) -> None:
        log.critical("device fault", error=fault.message)
        self._abandon(fault)
        self._on_fault(fault)

    def _abandon(self, error: Exception) -> None:
        """Ends every waiting and running job with ``error``; no later job is accepted."""
        with self._wake:
            self._stopping = True
            if isinstance(error, DeviceFault):
                self._fault = error
            self._planner.drain()
            jobs = [*self._running, *self._jobs.values()]
            self._jobs.clear()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


def is_device_fault(error: BaseException) -> bool:
    """Whether an error says that the device itself is lost, not that one batch was too much for it.
    Running out of device memory is the batch's failure: its halves may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if getattr(error, "error_code", None) in CUDA_CODES_OF_ONE_CALL:
        return False
    return isinstance(error, torch.AcceleratorError)


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
