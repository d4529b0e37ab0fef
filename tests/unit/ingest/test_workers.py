"""The threads that make pixels: what is run, what is told of it, and the end."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from encoder_service.ingest.workers import WorkerThreads


def test_jobs_run_in_order_and_beside_each_other() -> None:
    workers = WorkerThreads(2, "test")
    both = threading.Barrier(2)
    futures = [workers.submit(lambda: both.wait(10)) for _ in range(2)]
    assert sorted(future.result(10) for future in futures) == [0, 1]
    one, found = WorkerThreads(1, "test"), []
    for number in range(20):
        one.start_soon(lambda number=number: found.append(number))
    one.shutdown(wait=True)
    assert found == list(range(20))
    workers.shutdown()


def test_a_failure_is_its_futures_and_the_thread_goes_on() -> None:
    workers = WorkerThreads(1, "test")

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        workers.submit(fail).result(10)
    assert workers.submit(lambda: 5).result(10) == 5
    workers.shutdown()


def test_what_waits_at_a_shutdown_is_cancelled_or_run_as_asked() -> None:
    for cancel in (True, False):
        workers, begun, gate = WorkerThreads(1, "test"), threading.Event(), threading.Event()

        def hold(begun: threading.Event = begun, gate: threading.Event = gate) -> int:
            begun.set()
            assert gate.wait(10)
            return 1

        first, waiting = workers.submit(hold), workers.submit(lambda: 2)
        assert begun.wait(10)
        workers.shutdown(wait=False, cancel_futures=cancel)
        gate.set()
        assert first.result(10) == 1
        if cancel:
            with pytest.raises(CancelledError):
                waiting.result(10)
        else:
            assert waiting.result(10) == 2
        with pytest.raises(RuntimeError):
            workers.submit(lambda: 3)
        workers.shutdown()


def test_a_stop_before_the_first_job_starts_no_thread() -> None:
    before = threading.active_count()
    WorkerThreads(3, "test").shutdown()
    assert threading.active_count() == before


def test_a_finished_job_is_not_kept() -> None:
    class Pixels:
        pass

    import weakref

    workers, pixels = WorkerThreads(1, "test"), Pixels()
    seen = weakref.ref(pixels)
    workers.submit(lambda kept=pixels: None).result(10)
    del pixels
    workers.submit(lambda: None).result(10)  # the thread has let go of the first by then
    assert seen() is None
    workers.shutdown()
