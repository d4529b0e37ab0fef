"""A client that hangs up while its image is encoded: for both ways to get rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.harness.sglang import Encoder, Sglang
from bench.harness.waiting import wait_until
from tests.engines.pictures import picture
from tests.sglang.reference import IMAGE, prompt

ONE = prompt(IMAGE, "What is in the picture?")
# Pixels of a side: 1764 rows, which the tiny tower encodes in a second or two.
SIDE = 1344
# Calls that have ended, and items whose rows a call got.
COUNTED = ("ve_requests_total", "ve_items_total")


def left_during_encode(server: Sglang, encoders: Sequence[Encoder], **fields: object) -> bool:
    """Whether the encode ended with the client, once no encoder holds anything; else its rows were computed
    and left. fields: of the request."""
    image = picture(random.getrandbits(32), SIDE, SIDE)
    num_ended, num_items = (sum(one.total(name) for one in encoders) for name in COUNTED)
    server.leave(ONE, [image], lambda: any("ve_queued_patches" in one.held() for one in encoders), **fields)
    wait_until(lambda: sum(one.total(COUNTED[0]) for one in encoders) > num_ended, "the end of the call")
    wait_until(lambda: not any(one.held() for one in encoders), "the end of the encode")
    return sum(one.total(COUNTED[1]) for one in encoders) == num_items
