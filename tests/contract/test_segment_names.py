"""Publisher and service judge names of segments alike."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

from encoder_service.transport import pixel_names
from lm_adapter.transport import segment_names


def test_both_sides_read_the_names_that_the_adapter_makes() -> None:
    name = segment_names.new_name("ve-")
    publisher = pixel_names.publisher_of(name)
    life = pixel_names.life_of()
    assert life is not None
    process = (pixel_names.boot(), pixel_names.pid_namespace(), os.getpid(), life.start)
    assert publisher == (*process, "", False)
    assert name != segment_names.new_name("ve-")
    lock = segment_names.new_lock_name("ve-")
    assert pixel_names.publisher_of(lock) == (*process, lock, True)
    assert segment_names.is_lock_name(lock)
    held = segment_names.new_name("ve-", lock.rpartition(".")[2])
    assert pixel_names.publisher_of(held) == (*process, lock, False)
    assert not segment_names.is_lock_name(held)
    assert len(held.encode()) < 200


def test_p19_both_sides_call_the_same_names_orphans() -> None:
    name = segment_names.new_name("ve-")
    names = [name, "", "ve-", "psm_1234"]
    for _ in range(300):
        fields = name.split(".")
        position = random.randrange(len(fields))
        fields[position] = random.choice(["0", "1", str(os.getppid()), "ffffffff", "99999999999", "", "x.y"])
        names.append(".".join(fields))
    judged = [pixel_names.is_orphan(each) for each in names]
    assert judged == [segment_names.is_orphan(each) for each in names]
    assert any(judged)
    assert not all(judged)


def test_p19_both_sides_judge_by_the_lock_alike(tmp_path: Path) -> None:
    """Names of another PID namespace, whose locks are held, free, gone, not to be opened, or not told of."""
    here = f".{pixel_names.pid_namespace()}."
    elsewhere = f".{pixel_names.pid_namespace() + 1}."
    locks = [segment_names.new_lock_name("ve-").replace(here, elsewhere) for _ in range(4)]
    held, free, _, link = locks
    for lock in (held, free):
        (tmp_path / lock).touch()
    (tmp_path / link).symlink_to(free)
    names = [
        segment_names.new_name("ve-", lock.rpartition(".")[2]).replace(here, elsewhere) for lock in locks
    ]
    names += [*locks, segment_names.new_name("ve-").replace(here, elsewhere), segment_names.new_name("ve-")]
    of_another_boot = names[0].replace(f".{pixel_names.boot()}.", ".00000000.")
    folder = os.open(tmp_path, os.O_RDONLY)
    holder = os.open(tmp_path / held, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_SH)
        for side in (pixel_names, segment_names):
            found = []
            for name in [*names, of_another_boot]:
                with side.judged(name, folder) as is_dead:
                    found.append(is_dead)
            assert found == [False, True, True, False, False, True, True, False, False, False, True]
    finally:
        os.close(holder)
        os.close(folder)
