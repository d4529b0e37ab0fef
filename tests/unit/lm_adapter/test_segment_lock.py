"""The lock by which other PID namespaces see that a publisher of named segments has died."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_service.transport import pixel_names
from lm_adapter.transport import segment_lock, segment_names
from lm_adapter.transport.publish import publish_pixels
from tests.unit.transport.pixel_rig import PREFIX, source

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_locks() -> Iterator[None]:
    """None of another test's, and none left."""
    segment_lock._held.clear()
    yield
    segment_lock._held.clear()


def is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def lock_of(folder: Path, prefix: str = PREFIX) -> Path:
    (found,) = [path for path in folder.iterdir() if segment_names.is_lock_name(path.name)]
    assert found.name.startswith(prefix)
    return found


def test_p19_one_lock_is_held_for_all_segments_of_a_prefix_and_folder(tmp_path: Path) -> None:
    tokens: list[str] = []
    threads = [
        threading.Thread(target=lambda: tokens.append(segment_lock.held_lock(str(tmp_path), PREFIX)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    lock = lock_of(tmp_path)
    assert tokens == [lock.name.rpartition(".")[2]] * 8
    assert not is_free(lock)
    assert oct(lock.stat().st_mode & 0o777) == "0o600"
    with publish_pixels(np.zeros(4, np.float32), prefix=PREFIX, folder=str(tmp_path)) as published:
        publisher = pixel_names.publisher_of(published.name)
        assert publisher is not None
        assert publisher.lock == lock.name
    (tmp_path / "other").mkdir()
    assert segment_lock.held_lock(str(tmp_path / "other"), PREFIX) != tokens[0]
    segment_lock._held.clear()
    assert not lock.exists()


def test_p19_a_lock_that_was_taken_away_is_replaced(tmp_path: Path) -> None:
    first = segment_lock.held_lock(str(tmp_path), PREFIX)
    lock_of(tmp_path).unlink()
    second = segment_lock.held_lock(str(tmp_path), PREFIX)
    assert second != first
    assert lock_of(tmp_path).name.endswith(second)
    assert segment_lock.held_lock(str(tmp_path), PREFIX) == second


@pytest.mark.parametrize("how", ["looks", "removes"])
def test_p19_a_sweep_between_making_and_locking_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """looks: it has the lock while we ask. removes: it has had it, and the name is gone."""
    held: list[int] = []
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if len(held) < 2:
            path = lock_of(tmp_path)
            if how == "removes":
                held.append(-1)
                path.unlink()
            else:
                held.append(os.open(path, os.O_RDONLY))
                real(held[-1], fcntl.LOCK_EX)
        real(descriptor, operation)

    monkeypatch.setattr(segment_lock.fcntl, "flock", flock)
    try:
        token = segment_lock.held_lock(str(tmp_path), PREFIX)
    finally:
        monkeypatch.undo()
        for descriptor in held:
            if descriptor >= 0:
                os.close(descriptor)
    assert len(held) == 2
    assert lock_of(tmp_path).name.endswith(token)
    assert not is_free(lock_of(tmp_path))


def test_p19_a_descriptor_that_was_closed_behind_its_back_is_no_lock(tmp_path: Path) -> None:
    """Its number may be another file's by then, which stays open."""
    first = segment_lock.held_lock(str(tmp_path), PREFIX)
    number = segment_lock._held[str(tmp_path), PREFIX]._descriptor
    os.close(number)
    other = os.open(tmp_path, os.O_RDONLY)
    assert other == number
    second = segment_lock.held_lock(str(tmp_path), PREFIX)
    assert second != first
    os.fstat(other)
    os.close(other)
    (lock,) = [path for path in tmp_path.iterdir() if path.name.endswith(second)]
    assert not is_free(lock)
    os.close(segment_lock._held[str(tmp_path), PREFIX]._descriptor)
    assert segment_lock.held_lock(str(tmp_path), PREFIX) not in (first, second)


def test_p19_every_publish_tells_cleaners_that_the_lock_is_in_use(tmp_path: Path) -> None:
    segment_lock.held_lock(str(tmp_path), PREFIX)
    lock = lock_of(tmp_path)
    os.utime(lock, (1, 1))
    with publish_pixels(np.zeros(4, np.float32), prefix=PREFIX, folder=str(tmp_path)):
        assert lock.stat().st_mtime > 1_000_000


def test_p19_a_publish_in_the_midst_of_taking_a_lock_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler or a finalizer may, on the same thread."""
    inner: list[str] = []
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if not inner:
            inner.append("")
            inner.append(segment_lock.held_lock(str(tmp_path), PREFIX))
        real(descriptor, operation)

    monkeypatch.setattr(segment_lock.fcntl, "flock", flock)
    outer = segment_lock.held_lock(str(tmp_path), PREFIX)
    assert inner[1] == outer
    assert lock_of(tmp_path).name.endswith(outer)
    assert not is_free(lock_of(tmp_path))


def in_child(check: Callable[[], bool]) -> bool:
    """What it says in a forked process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_p19_a_fork_beside_a_thread_that_takes_a_lock_knows_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    real = fcntl.flock

    def slow(descriptor: int, operation: int) -> None:
        asked.set()
        time.sleep(0.3)
        real(descriptor, operation)

    monkeypatch.setattr(segment_lock.fcntl, "flock", slow)
    thread = threading.Thread(target=segment_lock.held_lock, args=(str(tmp_path), PREFIX))
    thread.start()
    assert asked.wait(20)

    def has_none() -> bool:
        links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return not any(link.startswith(str(tmp_path)) for link in links)

    assert in_child(has_none)
    thread.join(20)
    assert not is_free(lock_of(tmp_path))


@pytest.mark.parametrize("side", [pixel_names, segment_names], ids=["service", "adapter"])
def test_p19_a_fork_beside_a_sweep_does_not_keep_what_it_looks_at(tmp_path: Path, side: Any) -> None:
    lock = tmp_path / segment_names.new_lock_name(PREFIX).replace(
        f".{pixel_names.pid_namespace()}.", f".{pixel_names.pid_namespace() + 1}."
    )
    lock.touch()
    folder = os.open(tmp_path, os.O_RDONLY)
    reader, writer = os.pipe()
    with side.judged(lock.name, folder) as is_dead:
        assert is_dead
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent has looked
            os._exit(0)
    assert is_free(lock)
    for descriptor in (reader, writer, folder):
        os.close(descriptor)
    os.waitpid(pid, 0)


def test_p19_a_folder_without_locks_has_names_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(segment_lock.fcntl, "flock", refuse)
    with publish_pixels(np.zeros(4, np.float32), prefix=PREFIX, folder=str(tmp_path)) as published:
        publisher = pixel_names.publisher_of(published.name)
        assert publisher is not None
        assert publisher.lock == ""
        assert [path.name for path in tmp_path.iterdir()] == [published.name]


SCRIPT = """
import os, sys, time
import numpy as np
from lm_adapter.transport.publish import publish_pixels
published = publish_pixels(np.zeros((3, 4), np.float32), prefix="ve-test-", folder=sys.argv[1])
if sys.argv[2] == "fork" and os.fork() == 0:
    os.write(1, b"child\\n")
    time.sleep(60)
    os._exit(0)
os.write(1, b"ready\\n")
time.sleep(0 if sys.argv[2] == "exit" else 60)
"""


def publisher(folder: Path, way: str, *before: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*before, sys.executable, "-c", SCRIPT, str(folder), way],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/proto"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = {process.stdout.readline() for _ in range(2 if way == "fork" else 1)}
    assert lines == ({"child\n", "ready\n"} if way == "fork" else {"ready\n"})
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def test_p19_a_process_that_ends_leaves_no_lock(tmp_path: Path) -> None:
    publisher(tmp_path, "exit").communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_p19_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    process = publisher(tmp_path, "fork")
    try:
        lock = lock_of(tmp_path)
        assert not is_free(lock)
        process.kill()
        process.wait(30)
        assert is_free(lock)
    finally:
        end(process)


def can_unshare() -> bool:
    tool = shutil.which("unshare")
    command = [tool or "", "--pid", "--fork", "--mount-proc", "true"]
    return tool is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make PID namespaces")
@pytest.mark.parametrize("side", ["service", "adapter"])
def test_p19_a_publisher_killed_in_another_pid_namespace_is_swept_after(tmp_path: Path, side: str) -> None:
    pixels = source(tmp_path)
    assert pixels.folder is not None

    def sweep() -> int:
        assert pixels.folder is not None
        return pixels.folder.sweep() if side == "service" else segment_names.sweep(str(tmp_path), PREFIX)

    process = publisher(tmp_path, "kill", "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    try:
        told = [pixel_names.publisher_of(path.name) for path in tmp_path.iterdir()]
        assert len(told) == 2
        assert all(one is not None and one.pid_namespace != pixel_names.pid_namespace() for one in told)
        assert sweep() == 0
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        end(process)
    assert sweep() == 1
    assert list(tmp_path.iterdir()) == []
    pixels.folder.close()
