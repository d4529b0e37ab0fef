"""A client that hangs up while its image is encoded, by the plugin and by the protocol."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.engines.pictures import picture
from tests.sglang.processes import Encoder, Sglang
from tests.sglang.reference import IMAGE, prompt
from tests.waiting import wait_until

ONE = prompt(IMAGE, "What is in the picture?")
# Pixels of a side: 1764 rows, which the tiny tower encodes in a second or two.
SIDE = 1344
# Calls that have ended, and items whose rows a call got.
COUNTED = ("ve_requests_total", "ve_items_total")


def left_during_encode(server: Sglang, encoders: Sequence[Encoder], **fields: object) -> bool:
    """Whether the encode ended with the client, once no encoder holds anything; else its rows were computed
    and left. fields: of the request."""

    def total(name: str) -> float:
        return sum(encoder.total(name) for encoder in encoders)

    def held() -> set[str]:
        return {name for encoder in encoders for name in encoder.held()}

    image = picture(random.getrandbits(32), SIDE, SIDE)
    num_ended, num_items = map(total, COUNTED)
    server.leave(ONE, [image], lambda: "ve_queued_patches" in held(), **fields)
    wait_until(lambda: total(COUNTED[0]) > num_ended, "the end of the call")
    wait_until(lambda: not held(), "the end of the encode")
    return total(COUNTED[1]) == num_items
