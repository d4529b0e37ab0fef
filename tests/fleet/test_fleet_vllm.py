"""The vLLM connector's fetching thread and the front against a fleet of made-up encoders, without vLLM."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from lm_adapter import AsyncFleetClient, AsyncVisionEncoderClient, FleetSettings, ImageItem, ItemFailed
from lm_adapter.engines.vllm_encoders import EncoderFleet
from lm_adapter.engines.vllm_fetch import Fetched, Fetcher, FetchSettings
from lm_adapter.engines.vllm_front import Front
from lm_adapter.engines.vllm_items import Geometry, KeyedItem, WantedRows, read_params
from lm_adapter.engines.vllm_upstream import Failures
from lm_adapter.testing import FakeEncoder, fake_model, fake_rows
from lm_adapter.types import EncodedRows, Grid, PrefetchStatus

pytestmark = pytest.mark.anyio

GRID = Grid(1, 4, 6)
NUM_ROWS = 6
WIDTH = 128
GEOMETRY = Geometry(width=WIDTH, dtype="float32", num_levels=3, merge_size=2, merges_time=False)
SETTINGS = FleetSettings(refresh_s=0.5, check_interval_s=0.2, max_hedges=0, backoff_s=0.02)
RETRY_S = 6.0


class Fakes(list[FakeEncoder]):
    """They know the same images."""

    def __init__(self, fakes: list[FakeEncoder]) -> None:
        super().__init__(fakes)
        for one in self[1:]:
            one.script.grids = self[0].script.grids

    @property
    def targets(self) -> list[str]:
        return [one.target for one in self]

    def at(self, target: str) -> FakeEncoder:
        (found,) = [one for one in self if one.target == target]
        return found

    def digest(self) -> bytes:
        digest = secrets.token_bytes(32)
        self[0].script.grids[digest] = GRID
        return digest

    async def hold(self, number: int, digest: bytes) -> PrefetchStatus:
        """The image is that replica's alone."""
        async with AsyncVisionEncoderClient(self[number].target) as client:
            (status,) = await client.prefetch([ImageItem(b"x", digest=digest)])
        assert isinstance(status, PrefetchStatus)
        return status

    def num_calls(self, method: str) -> list[int]:
        return [one.num_calls[method] for one in self]


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    with contextlib.ExitStack() as stack:
        yield Fakes(
            [
                stack.enter_context(FakeEncoder(f"127.0.0.{number}:0", model=fake_model("qwen3_vl")))
                for number in (2, 3, 4)
            ]
        )


@pytest.fixture
def fetcher(fakes: Fakes) -> Iterator[Fetcher]:
    settings = FetchSettings.read(
        {"target": fakes.targets, "timeout_s": 20.0, "retry_s": RETRY_S, "transports": ["inline"]}
    )
    found = Fetcher(settings, GEOMETRY)
    yield found
    found.close()


def wanted(key: bytes, replica: str = "") -> WantedRows:
    return WantedRows("name", 6, key, GRID, NUM_ROWS * WIDTH * 4, replica)


async def ended(fetcher: Fetcher) -> Fetched:
    ends_s = time.monotonic() + 30
    while not fetcher.ended:
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.005)
    return fetcher.ended.popleft()


def is_right(outcome: object, digest: bytes) -> bool:
    return isinstance(outcome, EncodedRows) and bool(
        (outcome.numpy() == fake_rows(digest, NUM_ROWS, WIDTH)).all()
    )


async def test_the_replica_that_a_request_names_is_the_only_one_asked(fakes: Fakes, fetcher: Fetcher) -> None:
    for number in (1, 2):
        digest = fakes.digest()
        status = await fakes.hold(number, digest)
        fetcher.start("one", wanted(status.key, fakes[number].target))
        assert is_right((await ended(fetcher)).outcome, digest)
    assert fakes.num_calls("Fetch") == [0, 1, 1]
    assert fakes.num_calls("Lookup") == [0, 0, 0]


async def test_without_a_name_all_are_asked_and_the_holder_gives(fakes: Fakes, fetcher: Fetcher) -> None:
    digest = fakes.digest()
    status = await fakes.hold(2, digest)
    fetcher.start("one", wanted(status.key))
    assert is_right((await ended(fetcher)).outcome, digest)
    assert fakes.num_calls("Fetch") == [0, 0, 1]
    assert fakes.num_calls("Lookup") == [1, 1, 1]


async def test_an_address_in_a_request_is_never_connected_to(fakes: Fakes, fetcher: Fetcher) -> None:
    """Whatever it names, the rows come from where they are."""
    digest = fakes.digest()
    status = await fakes.hold(0, digest)
    with socket.create_server(("127.0.0.9", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        names = [
            f"127.0.0.9:{port}",
            f"dns:///127.0.0.9:{port}",
            "unix:/run/other.sock",
            "x\ny",
            fakes[1].target,
        ]
        for name in names:
            fetcher.start(name, wanted(status.key, name))
            assert is_right((await ended(fetcher)).outcome, digest)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_p32_rows_of_a_replica_that_died_are_given_up_at_once(fakes: Fakes, fetcher: Fetcher) -> None:
    """It was known: nothing is waited for."""
    status = await fakes.hold(1, fakes.digest())
    fetcher.start("before", wanted(status.key, fakes[1].target))
    assert isinstance((await ended(fetcher)).outcome, EncodedRows)
    fakes[1].stop()
    begun_s = time.monotonic()
    fetcher.start("after", wanted(status.key, fakes[1].target))
    outcome = (await ended(fetcher)).outcome
    assert isinstance(outcome, ItemFailed)
    assert outcome.reason == "UNKNOWN_KEY"
    assert time.monotonic() - begun_s < RETRY_S / 2


async def test_rows_of_a_replica_that_is_new_here_are_waited_for(fakes: Fakes) -> None:
    """The front's list may be a few seconds ahead; and what was known and is gone is not waited for."""
    listed = fakes.targets[:1]
    digest = fakes.digest()
    status = await fakes.hold(1, digest)
    fleet = EncoderFleet(AsyncFleetClient(lambda: listed, settings=SETTINGS, timeout_s=10))
    unknown = await fleet.fetch(wanted(status.key, fakes[1].target), 5)
    assert isinstance(unknown, ItemFailed)
    assert (unknown.reason, unknown.retryable) == ("UNKNOWN_KEY", True)
    assert fakes[1].target in unknown.message
    listed.append(fakes[1].target)
    ends_s = time.monotonic() + 10
    while isinstance(found := await fleet.fetch(wanted(status.key, fakes[1].target), 5), ItemFailed):
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.05)
    assert is_right(found, digest)
    del listed[1]
    while not isinstance(gone := await fleet.fetch(wanted(status.key, fakes[1].target), 5), ItemFailed):
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.05)
    assert (gone.reason, gone.retryable) == ("UNKNOWN_KEY", False)
    await fleet.close()


async def test_p32_a_key_that_a_replica_which_is_away_may_have_is_waited_for(fakes: Fakes) -> None:
    """By a request that names none. One that does is better sent anew."""
    fleet = EncoderFleet(AsyncFleetClient(fakes.targets, settings=SETTINGS, timeout_s=10))
    key = secrets.token_bytes(32)

    async def failure(replica: str = "") -> ItemFailed:
        outcome = await fleet.fetch(wanted(key, replica), 5)
        assert isinstance(outcome, ItemFailed)
        assert outcome.reason == "UNKNOWN_KEY"
        return outcome

    assert not (await failure()).retryable
    fakes[1].stop()
    ends_s = time.monotonic() + 10
    while not (last := await failure()).retryable:
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.02)
    assert fakes[1].target in last.message
    assert not (await failure(fakes[1].target)).retryable
    await fleet.close()


async def test_p32_a_fleet_that_is_away_is_waited_for(fakes: Fakes, fetcher: Fetcher) -> None:
    digest = fakes.digest()
    for one in fakes:
        one.stop()
    fetcher.start("one", wanted(secrets.token_bytes(32), fakes[0].target))
    await asyncio.sleep(0.5)
    assert not fetcher.ended
    for one in fakes:
        one.start()
    assert isinstance((await ended(fetcher)).outcome, ItemFailed)
    status = await fakes.hold(2, digest)
    ends_s = time.monotonic() + 10
    outcome: object = None
    while not is_right(outcome, digest):
        assert time.monotonic() < ends_s, outcome
        fetcher.start("two", wanted(status.key))
        outcome = (await ended(fetcher)).outcome


class FetchingVllm:
    """Fetches as the connector does, rejects as vLLM does, and tells why as the connector does."""

    def __init__(self, fetcher: Fetcher, failures_path: str) -> None:
        self.requests: list[list[KeyedItem]] = []
        self.before_fetch: list[Any] = []
        self._fetcher = fetcher
        self._failures_path = failures_path

    async def chat(self, request: Any) -> Response:
        items, reply = read_params((await request.json())["ec_transfer_params"])
        self.requests.append(items)
        if self.before_fetch:
            self.before_fetch.pop(0)(items)
        for item in items:
            self._fetcher.start(item, wanted(item.key, item.replica))
        for one in [await ended(self._fetcher) for _ in items]:
            if not isinstance(one.outcome, EncodedRows):
                assert isinstance(one.handle, KeyedItem)
                self._tell(reply, one.outcome.reason, one.handle.replica)
                return JSONResponse({"error": "Internal server error"}, 500)
        return JSONResponse({"choices": ["fine"]})

    def _tell(self, reply: str, reason: str, replica: str) -> None:
        account = {"reply": reply, "reason": reason, "message": "no rows", "replica": replica}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(json.dumps(account).encode(), self._failures_path)


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ve-front-") as folder:
        yield str(Path(folder) / "failures.sock")


@pytest.fixture
def vllm(fetcher: Fetcher, path: str) -> FetchingVllm:
    return FetchingVllm(fetcher, path)


@asynccontextmanager
async def front(vllm: FetchingVllm, targets: list[str], path: str) -> AsyncIterator[httpx.AsyncClient]:
    failures = Failures(path)
    failures.open()
    behind = FastAPI()
    behind.add_route("/v1/chat/completions", vllm.chat, methods=["POST"])
    http = httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="http://vllm")
    async with AsyncFleetClient(targets, settings=SETTINGS, timeout_s=5, transports=("inline",)) as client:
        await client.wait_ready(10, num_replicas=len(targets))
        served = FastAPI()
        served.add_route(
            "/v1/chat/completions", Front(client, http, failures, timeout_s=5).chat, methods=["POST"]
        )
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as outside:
            yield outside
    await http.aclose()
    failures.close()


def body_with(fakes: Fakes, num_images: int) -> dict[str, Any]:
    """Images that all fakes give a grid of the same size."""
    from blake3 import blake3

    parts = []
    for _ in range(num_images):
        data = secrets.token_bytes(16)
        fakes[0].script.grids[blake3(data).digest()] = GRID
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


async def test_the_front_sends_images_to_their_homes_and_says_where(
    vllm: FetchingVllm, fakes: Fakes, path: str
) -> None:
    async with front(vllm, fakes.targets, path) as client:
        answers = [await client.post("/v1/chat/completions", json=body_with(fakes, 6)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {item.replica for items in vllm.requests for item in items} == set(fakes.targets)
    assert fakes.num_calls("Lookup") == [0, 0, 0]
    assert len(vllm.requests) == 2


async def test_p32_a_replica_that_dies_between_encode_and_fetch_costs_one_more_encode(
    vllm: FetchingVllm, fakes: Fakes, path: str
) -> None:
    """The request is sent anew once, and to another replica."""
    async with front(vllm, fakes.targets, path) as client:
        vllm.before_fetch = [lambda items: fakes.at(items[0].replica).stop()]
        answer = await client.post("/v1/chat/completions", json=body_with(fakes, 1))
    assert answer.status_code == 200
    ((first,), (second,)) = vllm.requests
    assert first.key == second.key
    assert first.replica != second.replica


async def test_p32_a_replica_that_lost_rows_is_passed_over_the_second_time_and_no_other(
    vllm: FetchingVllm, fakes: Fakes, path: str
) -> None:
    async with front(vllm, fakes.targets, path) as client:

        def forget(items: list[KeyedItem]) -> None:
            fakes.at(items[0].replica).restart()

        vllm.before_fetch = [forget]
        answer = await client.post("/v1/chat/completions", json=body_with(fakes, 4))
    assert answer.status_code == 200
    first, second = vllm.requests
    assert [item.key for item in first] == [item.key for item in second]
    lost = first[0].replica
    assert lost not in {item.replica for item in second}
    assert all(before.replica in (lost, after.replica) for before, after in zip(first, second, strict=True))
