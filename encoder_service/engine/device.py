"""The device engine: keeps up to two batches on the device, so that it never idles while the host works.

Owns which thread does what and what happens when a batch fails. Leaves the choice of batches to the
planner, the work on the device to the launcher and everything about requests to the pipeline.

One thread hands batches over, up to two at a time; a second waits for the oldest and gives its rows out. With
one thread, either an item that comes while the device is busy would wait for the batch to end before its own
transfer starts, or the rows of a batch would wait for the next one; neither thread holds the interpreter's
lock while it waits or copies. While the device has a batch and what waits fills no other, the next one is
made just before the device needs it: made at once it would be as small as what has come by then, and small
batches take the device, and the interpreter's lock, longer for each item.

A batch that cannot be handed over is split and retried, so that one poisoned item fails alone. A fault of
the device itself, told late by the wait for a batch, fails everything in flight and waiting, once, with a
retryable error, and is reported to the owner, which takes the process out of service.
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
from encoder_service.engine.jobs import Batch, EngineCounters, Job, LatePlaces, TowerResult, reasons_of
from encoder_service.engine.launch import Launcher, TowerLauncher
from encoder_service.engine.resizing import Resizing
from encoder_service.engine.returns import Returns
from encoder_service.engine.rows import Destination
from encoder_service.errors import DeviceFault, Draining, InternalError
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.metrics import Metrics
from encoder_service.scheduler.outlook import Outlook
from encoder_service.scheduler.planner import Plan, Planner, Ticket, launch_of
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid, TowerItem

log = structlog.get_logger(__name__)

MAX_IN_FLIGHT = 2
# The event loop may take so long to find places for a batch's rows: longer than it holds its breath, and
# shorter than callers would notice.
PLACES_S = 0.25


class DeviceEngine:
    """The threads that touch the device.

    clock: seconds, monotonic, the one that deadlines are in. on_fault: called once, on an engine's thread,
    when the device failed. graphs: runs batches on the fast path; without it the tower does, plain. resizing:
    of images that are resized on the device. launcher: in place of the one that these make.
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
        resizing: Resizing | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._tower = tower
        self._planner = planner
        self._metrics = metrics
        self._clock = clock
        self._on_fault = on_fault
        self._num_threads = num_threads
        self.graphs = graphs
        self.resizing = resizing
        self._launcher = launcher or TowerLauncher(
            tower, preprocessor, graphs, clock=clock, resizing=resizing
        )
        self._device = tower.device
        # Guards everything below. Each thread waits for its own condition: one that is woken for nothing
        # takes the interpreter's lock from those who work.
        self._lock = threading.RLock()
        self._may_launch = threading.Condition(self._lock)
        self._may_finish = threading.Condition(self._lock)
        self._jobs: dict[Ticket, Job] = {}  # those that wait
        self._taken: dict[Job, None] = {}  # those whose batch was planned and who have no answer yet
        self._in_flight: deque[Batch] = deque()  # oldest first
        self._outlook = Outlook()
        self._stopping = False
        self._is_holding = False
        self._launching_is_over = False
        self._fault: DeviceFault | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for loop, name in ((self._launch_loop, "device-engine"), (self._finish_loop, "device-rows"))
        ]
        self.counters = EngineCounters()
        self.returns: Returns | None = None
        """Where items' late destinations are found; without, those items' rows go to host memory."""

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finishes the batches in flight, refuses what waits, joins the threads. False if they did not end
        within ``timeout_s``. Blocks; also right for an engine that never started."""
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

    def report(self, error: Exception) -> None:
        """What somebody else's work on the device failed with, on any thread: where that was the device's
        fault, everything ends as if a batch had found it."""
        if is_device_fault(error):
            self._fail(DeviceFault(f"the device failed: {first_line(error)}"))

    @property
    def queued_patches(self) -> int:
        with self._lock:
            return self._planner.num_patches

    @property
    def queued_items(self) -> int:
        with self._lock:
            return len(self._planner)

    def submit(
        self,
        item: TowerItem,
        ticket: Ticket,
        destination: Destination = None,
        late: Callable[[], Destination] | None = None,
    ) -> Future[TowerResult]:
        """Queues an item. destination: where on the device its rows go, the engine's until the future ends;
        host memory when left out. late: finds the destination when the item's batch is planned, on the loop
        of ``returns``. The future ends with its rows, or Cancelled, DeadlineExceeded, Draining,
        DeviceFault or InternalError. Raises DeviceFault when the device has failed already, Draining when
        the engine is stopping."""
        job = Job(item, ticket, destination, late)
        with self._lock:
            if self._fault is not None:
                raise self._fault
            if self._stopping:
                raise Draining("the engine is stopping and takes no new work")
            job.future.set_running_or_notify_cancel()  # from here on only the engine completes it
            self._jobs[ticket] = job
            self._planner.add(ticket)
            if self._has_room() and (not self._is_holding or self._planner.has_full_batch):
                self._may_launch.notify()
        return job.future

    def discard(self, ticket: Ticket) -> None:
        """Drops an item that nobody waits for, at once, so that its pixels do not outlive its permit behind
        a long batch. Does nothing for an item that runs already or has ended."""
        with self._lock:
            job = self._jobs.pop(ticket, None)
            if job is None:
                return
            self._planner.remove(ticket)
            self.counters.dropped_items += 1
        job.give_up()

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            return len(self._in_flight)

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
        except Exception as error:  # a defect of the loop itself: nobody would serve the queue any more
            log.exception("an engine's thread failed")
            self._fail(DeviceFault(f"the engine's thread failed: {first_line(error)}"))

    def _choose_device(self) -> None:
        """Makes the tower's GPU this thread's current one: streams, pinned memory and kernels that are
        launched by hand would otherwise go to the first."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    # -- the thread that launches ----------------------------------------------------------------------

    def _launch_loop(self) -> None:
        while True:
            with self._lock:
                self._may_launch.wait_for(lambda: self._stopping or (len(self._planner) and self._has_room()))
                if self._stopping:
                    break
                now_s = self._clock()
                hold_s = 0.0 if self._planner.has_full_batch else self._outlook.hold_s(now_s)
                if hold_s > 0.0:
                    self._is_holding = True
                    self._may_launch.wait(hold_s)
                    self._is_holding = False
                    continue
                plan = self._planner.next_batch(now_s, self._outlook.busy_s(now_s))
                batch = [self._jobs.pop(ticket) for ticket in plan.batch]
                self._taken.update(dict.fromkeys(batch))
                dropped = self._take_dropped(plan)
                self.counters.dropped_items += len(dropped)
            for job, error in dropped:
                job.future.set_exception(error)
            self._find_places(batch)
            self._launch(batch)
            del batch, plan, dropped
        self._abandon(Draining("the service stopped before the item ran"))
        with self._lock:
            self._launching_is_over = True
            self._wake_all()

    def _wake_all(self) -> None:
        self._may_launch.notify_all()
        self._may_finish.notify_all()

    def _has_room(self) -> bool:
        return len(self._in_flight) < MAX_IN_FLIGHT

    def _take_dropped(self, plan: Plan) -> list[tuple[Job, Exception]]:
        return [(self._jobs.pop(ticket), error) for ticket, error in reasons_of(plan)]

    def _find_places(self, jobs: list[Job]) -> None:
        """Has the loop find the destinations that wait for their batch. Items are late where many wait, so
        that the device has a batch meanwhile."""
        if self.returns is None or not any(job.late for job in jobs):
            return
        places = LatePlaces(jobs)
        self.returns.post(places.find)
        if not places.wait(PLACES_S):
            self.counters.unanswered_places += 1

    def _launch(self, jobs: list[Job]) -> None:
        """Hands a batch to the device; on failure its halves; a single item's failure is its own. Waits
        while two batches are in flight, as the first half of a batch that failed may be."""
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
        # Outside the handler: the exception's traceback holds the failed batch's tensors, and halves that
        # should fit after running out of memory would not.
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
            self._outlook.launched(started_s, predicted_us)
            self._may_finish.notify()

    def _check_failure(self, error: Exception) -> str:
        """What to say of a failed batch. Raises DeviceFault when the device has failed: an earlier batch's
        fault may show first in a later one's launch, and under another name."""
        try:
            if is_device_fault(error):
                raise error
            self._launcher.probe()
        except Exception as found:
            raise DeviceFault(f"the device failed: {first_line(found)}") from found
        return first_line(error)

    # -- the thread that finishes ----------------------------------------------------------------------

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
        """Waits for the oldest batch, makes room for the next and hands every item its rows."""
        failure, tower_s = "", 0.0
        try:
            tower_s = batch.launched.wait()
        except Exception as error:
            failure = self._check_failure(error)
        ended_s = self._clock()
        with self._lock:
            self._in_flight.popleft()
            self._outlook.finished(ended_s)
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
        except Exception as error:  # host memory ran out: items that have their rows keep them
            failure = self._check_failure(error)
        if failure:
            self._fail_items(batch.jobs, failure)

    # -- failures --------------------------------------------------------------------------------------

    def _claim(self, job: Job) -> bool:
        """Whether the caller is the one to answer a planned job: either thread may be failing everything."""
        with self._lock:
            return self._taken.pop(job, job) is None

    def _fail_items(self, jobs: list[Job], failure: str) -> None:
        """Ends those of ``jobs`` that have no answer yet."""
        for job in jobs:
            if not self._claim(job):
                continue
            with self._lock:
                self.counters.failed_items += 1
            log.error("item failed in the tower", grid=tuple(job.item.grid), error=failure)
            job.future.set_exception(InternalError(f"the tower failed: {failure}"))

    def _fail(self, fault: DeviceFault) -> None:
        """Ends everything, planned or waiting, with the fault. The second thread to notice does nothing."""
        with self._lock:
            if self._fault is not None:
                return
            self._fault = fault
        log.critical("device fault", error=fault.message)
        self._abandon(fault)
        self._on_fault(fault)

    def _abandon(self, error: Exception) -> None:
        """Ends every waiting job with ``error``; after a fault with the fault, and the planned ones too. No
        later job is accepted."""
        with self._lock:
            # While stopping, one thread may come here before the other that has just noticed a fault.
            error = self._fault or error
            self._stopping = True
            self._planner.drain()
            jobs = list(self._jobs.values())
            self._jobs.clear()
            if self._fault is not None:
                jobs = [*self._taken, *jobs]
                self._taken.clear()
            self._wake_all()
        for job in jobs:
            job.future.set_exception(error)
