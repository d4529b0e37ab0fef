"""The device engine: keeps up to two batches on the device, so that it never idles while the host works.

Owns the two threads that use the device, and the handling of batches that fail. The planner chooses batches,
the launcher runs them on the device, and the pipeline owns everything about requests.

One thread launches batches, up to two at a time. The other waits for the oldest batch and hands out its rows.
While the device is busy and the waiting items do not fill a batch, the next batch is formed just before the
device needs it, so that items that arrive in the meantime share it.

A batch that cannot be launched is split and retried, so that a bad item fails alone. A fault of the device
itself fails everything in flight and waiting with one retryable error. It is reported to the owner, which
takes the process out of service.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog
import torch

from encoder_service.engine.faults import first_line, is_device_fault
from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.jobs import (
    Batch,
    EngineCounters,
    Job,
    TowerResult,
)
from encoder_service.engine.launch import Launcher, TowerLauncher
from encoder_service.errors import DeviceFault, Draining, InternalError
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.planner import Planner, Ticket, cancelled_error, launch_of
from encoder_service.scheduler.timeline import DeviceTimeline
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid, TowerItem

log = structlog.get_logger(__name__)

MAX_IN_FLIGHT = 2


class DeviceEngine:
    """The threads that use the device.

    clock: seconds, monotonic, the clock of the deadlines. on_fault: called once, on an engine thread, when
    the device has failed. num_threads: torch's threads on a CPU; 0 leaves the choice to torch. graphs: the
    fast path; None for the plain tower. launcher, timeline: replace the defaults.
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
        launcher: Launcher | None = None,
        timeline: DeviceTimeline | None = None,
    ) -> None:
        self._planner = planner
        self._metrics = metrics
        self._clock = clock
        self._on_fault = on_fault
        self._num_threads = num_threads
        self.graphs = graphs
        self._launcher = launcher or TowerLauncher(tower, preprocessor, graphs, clock=clock)
        self._device = tower.device
        # Guards the attributes below.
        self._lock = threading.RLock()
        self._may_launch = threading.Condition(self._lock)
        self._may_finish = threading.Condition(self._lock)
        self._waiting: dict[Ticket, Job] = {}
        self._planned: dict[Job, None] = {}  # taken out of the queue, future not completed yet
        self._in_flight: deque[Batch] = deque()  # oldest first
        self._timeline = timeline or DeviceTimeline()
        self._stopping = False
        self._is_delaying = False
        self._launching_is_over = False
        self._fault: DeviceFault | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for loop, name in ((self._launch_loop, "device-engine"), (self._finish_loop, "device-rows"))
        ]
        self.counters = EngineCounters()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finishes the batches in flight, fails waiting items with Draining, joins the threads. Returns False
        if they did not end within ``timeout_s``. Blocks. Also works for an engine that was never started."""
        with self._lock:
            self._stopping = True
            self._wake_all()
        if self._threads[0].ident is None:
            self._abandon(Draining("the service stopped before the item ran"))
            return True
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def fault(self) -> DeviceFault | None:
        return self._fault

    def report(self, error: Exception) -> bool:
        """Reports an error of other work on the device, from any thread. Returns whether the device has
        failed; if so, everything ends as if a batch had failed."""
        if is_device_fault(error):
            self._fail(DeviceFault(f"the device failed: {first_line(error)}"))
        return self._fault is not None

    def submit(
        self, item: TowerItem, ticket: Ticket, destination: torch.Tensor | None = None
    ) -> Future[TowerResult]:
        """Queues an item. destination: memory for its rows, [R, W] in the rows' dtype, contiguous, on the
        tower's device or in host memory (pinned if the tower is on a GPU); it belongs to the engine until the
        future ends. None: the result has its own host tensor.

        The future completes on an engine thread when the rows are in place, that is after the device has
        finished the forward pass and the copy. It may fail with Cancelled, DeadlineExceeded, Draining,
        DeviceFault or InternalError. Raises DeviceFault after the device failed, Draining while the engine
        stops."""
        job = Job(item, ticket, destination)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            if self._stopping:
                raise Draining("the engine is stopping and takes no new work")
            job.future.set_running_or_notify_cancel()  # a caller cannot cancel it any more
            self._waiting[ticket] = job
            self._planner.add(ticket)
            if self._has_room() and (not self._is_delaying or self._planner.has_full_batch):
                self._may_launch.notify()
        return job.future

    def discard(self, ticket: Ticket) -> None:
        """Drops a waiting item at once, so that its pixels are freed together with its permit and not only
        after a long batch. Does nothing for an item that already runs or has ended."""
        with self._lock:
            job = self._waiting.pop(ticket, None)
            if job is None:
                return
            self._planner.remove(ticket)
            self.counters.dropped_items += 1
        job.future.set_exception(cancelled_error())

    def warm_up(self, grids: Sequence[Grid]) -> None:
        """Runs items of the given grids once, on the caller's thread, before ``start``."""
        self._choose_device()
        self._launcher.warm_up(grids)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            self._choose_device()
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                loop()
        except DeviceFault as fault:
            self._fail(fault)
        except Exception as error:  # a defect of the loop itself, after which nothing would serve the queue
            log.exception("an engine's thread failed")
            self._fail(DeviceFault(f"the engine's thread failed: {first_line(error)}"))

    def _choose_device(self) -> None:
        """Makes the tower's GPU the current device of this thread, for streams, pinned memory and Triton."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    # -- launch thread ---------------------------------------------------------------------------------

    def _launch_loop(self) -> None:
        while True:
            with self._lock:
                self._may_launch.wait_for(lambda: self._stopping or (len(self._planner) and self._has_room()))
                if self._stopping:
                    break
                now_s = self._clock()
                delay_s = 0.0 if self._planner.has_full_batch else self._timeline.batch_delay_s(now_s)
                if delay_s > 0.0:
                    self._is_delaying = True
                    self._may_launch.wait(delay_s)
                    self._is_delaying = False
                    continue
                plan = self._planner.next_batch(now_s)
                batch = [self._waiting.pop(ticket) for ticket in plan.batch]
                self._planned.update(dict.fromkeys(batch))
                dropped = [(self._waiting.pop(ticket), error) for ticket, error in plan.dropped.items()]
                self.counters.dropped_items += len(dropped)
            for job, error in dropped:
                job.future.set_exception(error)
            self._launch(batch)
            del batch, plan, dropped  # frees their memory before the wait for the next batch
        self._abandon(Draining("the service stopped before the item ran"))
        with self._lock:
            self._launching_is_over = True
            self._wake_all()

    def _wake_all(self) -> None:
        self._may_launch.notify_all()
        self._may_finish.notify_all()

    def _has_room(self) -> bool:
        return len(self._in_flight) < MAX_IN_FLIGHT

    def _launch(self, jobs: list[Job]) -> None:
        """Launches a batch. If that fails, launches its halves; a single item that fails gets the error.
        Waits while two batches are in flight; the first half of a failed batch may be one of them."""
        if not jobs:
            return
        with self._lock:
            self._may_launch.wait_for(lambda: self._fault is not None or self._has_room())
            if self._fault is not None:
                return
        started_s = self._clock()
        failure = ""
        try:
            launched = self._launcher.launch([job.item for job in jobs], [job.destination for job in jobs])
        except Exception as error:
            failure = self._check_failure(error)
        # Outside the except block, because the exception's traceback holds the failed batch's tensors: after
        # an out-of-memory error the halves would not fit beside them.
        if failure and len(jobs) > 1:
            self.counters.retried_batches += 1
            log.warning("batch failed, retrying its halves", items=len(jobs), error=failure)
            middle = len(jobs) // 2
            self._launch(jobs[:middle])
            self._launch(jobs[middle:])
            return
        if failure:
            self._fail_items(jobs, failure)
            return
        self._metrics.step_host_seconds.observe(self._clock() - started_s)
        predicted_us = self._planner.predicted_us(job.ticket for job in jobs)
        with self._lock:
            self._in_flight.append(Batch(jobs, launched))
            self._timeline.launched(started_s, predicted_us)
            self._may_finish.notify()

    def _check_failure(self, error: Exception) -> str:
        """The error text of a batch's failure. Raises DeviceFault if the device has failed: the fault of an
        earlier batch may first appear in the launch of a later one, and as another error."""
        try:
            if is_device_fault(error):
                raise error
            self._launcher.probe()
        except Exception as fault:
            raise DeviceFault(f"the device failed: {first_line(fault)}") from fault
        return first_line(error)

    # -- finish thread ---------------------------------------------------------------------------------

    def _finish_loop(self) -> None:
        while True:
            with self._lock:
                self._may_finish.wait_for(
                    lambda: self._in_flight or self._launching_is_over or self._fault is not None
                )
                if self._fault is not None or not self._in_flight:
                    return
                batch = self._in_flight[0]
            self._finish(batch)
            del batch

    def _finish(self, batch: Batch) -> None:
        """Waits for the oldest batch, makes room for the next and completes every item with its rows."""
        failure, tower_s = "", 0.0
        try:
            tower_s = batch.launched.wait()
        except Exception as error:
            failure = self._check_failure(error)
        ended_s = self._clock()
        with self._lock:
            self._in_flight.popleft()
            self._timeline.finished(ended_s)
            self._may_launch.notify()
        if failure:
            self._fail_items(batch.jobs, failure)
            return
        num_patches = sum(job.item.grid.num_patches for job in batch.jobs)
        self.counters.batches += 1
        self.counters.items += len(batch.jobs)
        self.counters.patches += num_patches
        self.counters.busy_s += tower_s
        self._metrics.batch_patches.observe(num_patches)
        if self.graphs is not None:
            predicted_us = self.graphs.ladder.predicted_us(launch_of(job.ticket for job in batch.jobs))
            self._metrics.batch_time_ratio.observe(tower_s * 1e6 / predicted_us)
        try:
            for job, rows in zip(batch.jobs, batch.launched.collect(), strict=True):
                if self._claim(job):
                    job.future.set_result(TowerResult(rows, ended_s - tower_s, tower_s * 1e3))
        except Exception as error:  # out of host memory; items that already have their rows keep them
            failure = self._check_failure(error)
        if failure:
            self._fail_items(batch.jobs, failure)

    # -- failures --------------------------------------------------------------------------------------

    def _claim(self, job: Job) -> bool:
        """Whether the calling thread may complete a planned job. The other thread may be failing all jobs
        with a fault."""
        with self._lock:
            return self._planned.pop(job, job) is None

    def _fail_items(self, jobs: list[Job], failure: str) -> None:
        """Fails those of ``jobs`` that are not completed yet."""
        for job in jobs:
            if not self._claim(job):
                continue
            log.error("item failed in the tower", grid=tuple(job.item.grid), error=failure)
            job.future.set_exception(InternalError(f"the tower failed: {failure}"))

    def _fail(self, fault: DeviceFault) -> None:
        """Fails everything, planned or waiting, with the fault. Only the first call has an effect."""
        with self._lock:
            if self._fault is not None:
                return
            self._fault = fault
        log.critical("device fault", error=fault.message)
        self._abandon(fault)
        self._on_fault(fault)

    def _abandon(self, error: Exception) -> None:
        """Fails every waiting job with ``error``. After a device fault, fails waiting and planned jobs with
        the fault. Later jobs are refused."""
        with self._lock:
            # While stopping, one thread may get here before the other has reported its fault.
            error = self._fault or error
            self._stopping = True
            self._planner.drain()
            jobs = list(self._waiting.values())
            self._waiting.clear()
            if self._fault is not None:
                jobs = [*self._planned, *jobs]
                self._planned.clear()
            self._wake_all()
        for job in jobs:
            job.future.set_exception(error)
