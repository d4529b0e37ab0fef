"""The wall clock is set ahead and back under a running service: deadlines, tokens and the drain ignore it.

The service's process alone has the new time, as a host has whose clock NTP corrects.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import ImageItem, RequestRefused, VisionEncoderClient
from tests.chaos.wall_clock import WallClock, can_compile
from tests.integration.images import photo
from tests.integration.test_process import ENV
from tests.unit.transport.broker_rig import socket_folder
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not can_compile(), reason="needs a C compiler as cc on PATH"),
]
DAY_S = 86_400
JUMPS = (DAY_S, -3 * DAY_S, 400 * DAY_S, -5 * 3600)
LIMIT_S = 30.0


class Clocked:
    """A service process with a wall clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.wall_clock = WallClock(folder)
        make_checkpoint(folder / "model", "qwen3_vl", "tiny", 5)
        self.target = f"unix:{folder}/grpc.sock"
        self.tokens = folder / "tokens"
        self.tokens.write_text("closed=first\n")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "encoder_service", "serve", "--model", str(folder / "model"),
                "--device", "cpu", "--dtype", "float32", "--listen", self.target,
                "--admin-listen", "",
            ],
            env={**ENV, **self.wall_clock.environment, "VE_TOKENS_FILE": str(self.tokens)},
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready")


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    with socket_folder() as folder:
        found = Clocked(folder)
        try:
            yield found
        finally:
            found.process.kill()
            found.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_deadlines_and_calls_under_way_are_unaffected(clocked: Clocked) -> None:
    """A call that began before the jump is answered, and one after it has its whole deadline."""
    with (
        VisionEncoderClient(clocked.target, timeout_s=LIMIT_S) as client,
        grpc.insecure_channel(clocked.target) as channel,
    ):
        client.info()
        lookup = channel.stream_unary("/vision_encoder.v1.VisionEncoder/Lookup")
        for jump_s in JUMPS:
            go_on = threading.Event()
            request = pb.LookupRequest(keys=[bytes(32)]).SerializeToString()

            def messages(go_on: threading.Event = go_on, request: bytes = request) -> Iterator[bytes]:
                go_on.wait(LIMIT_S)
                yield request

            under_way = lookup.future(messages(), timeout=LIMIT_S)
            time.sleep(0.1)
            clocked.wall_clock.jump(jump_s)
            rows = client.encode_one(ImageItem(photo(64, 48)), timeout_s=10)
            assert 0 <= rows.timings.total_ms < 10_000
            go_on.set()
            assert pb.LookupResponse.FromString(under_way.result(LIMIT_S)).statuses


def test_tokens_change_with_their_file_at_any_modification_time(clocked: Clocked) -> None:
    def opens(token: str) -> bool:
        with VisionEncoderClient(
            clocked.target, namespace="closed", token=token, timeout_s=LIMIT_S
        ) as client:
            try:
                client.lookup([bytes(32)])
            except RequestRefused:
                return False
            return True

    assert opens("first")
    for jump_s in JUMPS:
        clocked.wall_clock.jump(jump_s)
        token = secrets.token_hex(8)
        clocked.tokens.write_text(f"closed={token}\n")
        at_s = time.time() + clocked.wall_clock.offset_s
        os.utime(clocked.tokens, (at_s, at_s))  # as a host with this clock would have written it
        until(lambda token=token: opens(token))  # type: ignore[misc]
        assert not opens("first")


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_p37_the_drain_ends_in_time(clocked: Clocked, jump_s: int) -> None:
    with VisionEncoderClient(clocked.target, timeout_s=LIMIT_S) as client:
        client.encode_one(ImageItem(photo(64, 48)))
        clocked.process.send_signal(signal.SIGTERM)
        clocked.wall_clock.jump(jump_s)
        assert clocked.process.wait(20) == 0


def test_the_wall_clock_alone_jumps(tmp_path: Path) -> None:
    """In a running process."""
    clock = WallClock(tmp_path)
    with subprocess.Popen(
        [
            sys.executable, "-uc",
            "import time\nwhile input(): print(time.time(), time.monotonic(), time.time_ns() // 10**9)",
        ],
        env={**ENV, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for jump_s in (0, DAY_S, -3 * DAY_S):
            clock.jump(jump_s)
            process.stdin.write("now\n")
            process.stdin.flush()
            wall_s, monotonic_s, whole_s = map(float, process.stdout.readline().split())
            assert abs(wall_s - clock.offset_s - time.time()) < 5
            assert abs(whole_s - wall_s) <= 1
            assert abs(monotonic_s - time.monotonic()) < 5
        process.stdin.write("\n")
        process.stdin.flush()
