"""A made-up encoder at a real one's address, and what it does wrong: for the plugins of both engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from lm_adapter import VisionEncoderClient
from lm_adapter.items import Grid
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model
from tests.engines.pictures import picture

# Of a picture of 200 x 260 pixels.
GRID = Grid(1, 20, 16)
NUM_ROWS = 80
# The geometry of the tiny checkpoint of Qwen3-VL.
WIDTH: dict[str, Any] = {"out_width": 64, "num_deepstack_levels": 2, "dtype": "float32"}
NUM_BYTES = NUM_ROWS * 3 * 64 * 4
FAULTS: dict[Fault, tuple[Any, ...]] = {
    Fault.WRONG_NUM_ROWS: (502, "INVALID_ROWS", f"{NUM_ROWS + 1} rows", f"needs {NUM_ROWS}"),
    Fault.WRONG_WIDTH: (502, "INVALID_ROWS", "width", "192"),
    Fault.WRONG_LEVELS: (502, "INVALID_ROWS", "num_deepstack_levels"),
    Fault.WRONG_GRID: (502, "INVALID_ROWS", "grid_thw"),
    Fault.WRONG_DTYPE: (502, "INVALID_ROWS", "dtype"),
    Fault.NON_FINITE: (502, "INVALID_ROWS", "finite"),
    Fault.SHORT_CHUNK: (502,),
    Fault.MISSING_ITEM: (503, "TRUNCATED_STREAM"),
    Fault.GARBAGE: (502,),
    Fault.ABORT: (502,),
}
"""Fault -> status and words of the message to the client."""
OTHER_MODELS: tuple[tuple[dict[str, Any], Grid, tuple[str, ...]], ...] = (
    ({"out_width": 48}, GRID, ("MODEL_MISMATCH", "of 144 elements", "takes 192", "--model")),
    ({"num_deepstack_levels": 1}, GRID, ("MODEL_MISMATCH", "with 1 deepstack levels", "takes 2")),
    (
        {"dtype": "bfloat16"},
        GRID,
        ("MODEL_MISMATCH", "in bfloat16", "start the encoder with --dtype float32"),
    ),
    ({}, Grid(1, 16, 20), ("INVALID_ROWS", "1, 16, 20", "1, 20, 16")),
)
"""Changes of an encoder's model and grid -> words of the message to the client."""


@contextmanager
def in_place_of(encoder: Any, script: FakeScript) -> Iterator[FakeEncoder]:
    """A made-up encoder at the real one's address, then the real one again."""
    encoder.stop()
    try:
        with FakeEncoder(encoder.target, script=script) as fake:
            with VisionEncoderClient(encoder.target) as client:
                client.wait_ready(30)
            yield fake
    finally:
        encoder.start()


def script_for(digest: bytes, grid: Grid = GRID, **changes: Any) -> FakeScript:
    return FakeScript(model=fake_model(**{**WIDTH, **changes}), grids={digest: grid})


def new_picture() -> tuple[bytes, bytes]:
    """A picture of GRID, and its digest."""
    data = picture(random.getrandbits(32))
    return data, content_digest(data)


def answer_to(fault: Fault, fake: FakeEncoder, ask: Callable[[bytes], httpx.Response]) -> httpx.Response:
    """To a request whose image the encoder gets wrong, beside another one that has to succeed."""
    (bad, bad_digest), (good, good_digest) = new_picture(), new_picture()
    fake.script.grids |= {bad_digest: GRID, good_digest: GRID}
    fake.script.faults[bad_digest] = fault
    with ThreadPoolExecutor(2) as pool:
        of_bad, of_good = pool.map(ask, (bad, good))
    assert of_good.status_code == 200, of_good.text
    return of_bad
