"""Publisher and service judge names of segments alike."""

from __future__ import annotations

import os
import random

from encoder_service.transport import pixel_names
from lm_adapter.transport import segment_names


def test_both_sides_read_the_names_that_the_adapter_makes() -> None:
    name = segment_names.new_name("ve-")
    publisher = pixel_names.publisher_of(name)
    life = pixel_names.life_of()
    assert life is not None
    assert publisher == (pixel_names.boot(), pixel_names.pid_namespace(), os.getpid(), life.start)
    assert name != segment_names.new_name("ve-")
    assert len(name.encode()) < 200


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
