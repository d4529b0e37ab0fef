"""Names that say who made them, and the sweep of what the dead left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from encoder_service.transport import pixel_folder, pixel_names
from encoder_service.transport.pixel_names import boot, is_orphan, life_of, pid_namespace, publisher_of
from tests.unit.transport.pixel_rig import PREFIX, put, source


def own_start() -> int:
    life = life_of()
    assert life is not None
    return life.start


def name_of(
    pid: int, start: int, *, of_boot: str = "", namespace: int = 0, prefix: str = PREFIX, last: str = ""
) -> str:
    """last: the fields behind the start, where they are not one of random digits."""
    last = last or os.urandom(8).hex()
    return f"{prefix}.{of_boot or boot()}.{namespace or pid_namespace()}.{pid}.{start}.{last}"


def dead_process() -> tuple[int, int]:
    """The number and the start of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = life_of(process.pid)
    assert life is not None
    process.communicate(b"\n", timeout=30)
    return process.pid, life.start


def test_p19_only_the_certainly_dead_have_orphans() -> None:
    pid, start = dead_process()
    assert is_orphan(name_of(pid, start))
    assert not is_orphan(name_of(os.getpid(), own_start()))
    # Another process has the number by now.
    assert is_orphan(name_of(os.getpid(), own_start() - 1))
    # Seen from another PID namespace, numbers mean nothing.
    assert not is_orphan(name_of(pid, start, namespace=pid_namespace() + 1))
    assert is_orphan(name_of(os.getpid(), own_start(), of_boot="0" * 8 if boot() != "0" * 8 else "1" * 8))
    assert not is_orphan(name_of(0, 0))
    assert not is_orphan(name_of(9_999_999_999, 1))


def test_p19_a_process_that_is_hidden_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(pixel_names.os, "kill", forbidden)
    monkeypatch.setattr(pixel_names, "life_of", lambda _: None)
    assert not is_orphan(name_of(4711, 1))


def test_p19_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = life_of(process.pid)
    assert life is not None
    name = name_of(process.pid, life.start)
    assert not is_orphan(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_orphan(name)
    process.communicate(timeout=30)


@pytest.mark.parametrize(
    "name",
    [
        "",
        PREFIX,
        "psm_1234abcd",
        name_of(1, 1)[:-1],
        name_of(1, 1) + "0",
        name_of(1, 1) + ".0",
        name_of(1, 1, last="lock"),
    ],
    # of random names, each worker would have its own
    ids=["empty", "prefix", "another-s", "cut", "longer", "short-lock", "lock-alone"],
)
def test_names_that_say_nothing_are_never_judged(name: str) -> None:
    assert publisher_of(name) is None
    assert not is_orphan(name)


def test_p19_the_sweep_takes_orphans_under_our_prefixes_and_nothing_else(tmp_path: Path) -> None:
    pid, start = dead_process()
    orphans = [put(tmp_path, b"x", name=name_of(pid, start)) for _ in range(3)]
    kept = [
        put(tmp_path, b"x", name=name_of(os.getpid(), own_start())),
        put(tmp_path, b"x", name=name_of(pid, start, prefix="someone-elses")),
        put(tmp_path, b"x", name=f"{PREFIX}of-a-gateway"),
    ]
    link, folder = name_of(pid, start), name_of(pid, start)
    (tmp_path / link).symlink_to("elsewhere")
    (tmp_path / folder).mkdir()
    pixels = source(tmp_path)
    assert pixels.folder is not None
    assert pixels.folder.sweep() == len(orphans)
    assert pixels.folder.sweep() == 0
    assert pixels.counters.swept == len(orphans)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, link, folder}
    pixels.folder.close()


def test_p19_the_sweep_spares_files_of_other_users_and_outlives_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(tmp_path, b"x", name=name_of(*dead_process()))
    strangers = source(tmp_path, allowed_uids=[os.geteuid() + 1])
    assert strangers.folder is not None
    assert strangers.folder.sweep() == 0
    strangers.folder.close()
    ours = source(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    assert ours.folder is not None
    with monkeypatch.context() as patched:
        patched.setattr(pixel_folder.os, "unlink", refuse)
        assert ours.folder.sweep() == 0
    assert (tmp_path / name).exists()
    assert ours.folder.sweep() == 1
    ours.folder.close()


def test_p19_what_another_pid_namespaces_dead_left_is_swept_by_their_lock(tmp_path: Path) -> None:
    pid, start = dead_process()
    elsewhere = pid_namespace() + 1
    held, free, gone = (os.urandom(8).hex() for _ in range(3))

    def of(last: str) -> str:
        return put(tmp_path, b"x", name=name_of(pid, start, namespace=elsewhere, last=last))

    locks = {token: of(f"lock.{token}") for token in (held, free)}
    segments = {
        token: [of(f"{os.urandom(8).hex()}.{token}") for _ in range(2)] for token in (held, free, gone)
    }
    without = of(os.urandom(8).hex())
    holder = os.open(tmp_path / locks[held], os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    pixels = source(tmp_path)
    assert pixels.folder is not None
    assert pixels.folder.sweep() == 4
    assert {path.name for path in tmp_path.iterdir()} == {locks[held], *segments[held], without}
    # The lock is not what is being counted, and nobody's look at it stays.
    assert pixels.folder.sweep() == 0
    os.close(holder)
    assert pixels.folder.sweep() == 2
    assert {path.name for path in tmp_path.iterdir()} == {without}
    assert pixels.counters.swept == 6
    pixels.folder.close()
