"""The send buffer: who gets parts of it, when they are free again, and which engine writes them."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError, TransportUnavailable
from encoder_service.protocols.tokenspeed import mooncake as module
from encoder_service.protocols.tokenspeed.mooncake import Mooncake
from tests.unit.protocols.mooncake_engine import FakeMooncake, fake_mooncake
from tests.unit.service.rig import until

pytestmark = pytest.mark.anyio
CPU, SIZE_BYTES = torch.device("cpu"), 1 << 20
ROWS = torch.arange(24 * 6, dtype=torch.float32).view(24, 6)
RECEIVED = ROWS.bfloat16()


@pytest.fixture
def fake() -> Iterator[FakeMooncake]:
    with fake_mooncake() as fake:
        yield fake


def new_mooncake(device: torch.device = CPU, **changed: Any) -> Mooncake:
    fields = {"serve_tokenspeed": "127.0.0.1:0", "tokenspeed_send_bytes": SIZE_BYTES} | changed
    return Mooncake(parse_settings(model=Path("/m"), **fields), device)


@pytest.fixture
def mooncake(fake: FakeMooncake) -> Iterator[Mooncake]:
    mooncake = new_mooncake()
    yield mooncake
    mooncake.close()


async def send(mooncake: Mooncake, session: str, rows: torch.Tensor = ROWS) -> torch.Tensor:
    """Returns what a receiver has got of rows [R, 2 + 4] in bfloat16."""
    main = torch.zeros(len(rows), 2, dtype=torch.bfloat16)
    deepstack = torch.zeros(len(rows), 4, dtype=torch.bfloat16)
    async with mooncake.staged(rows, 2, torch.bfloat16, session.rpartition(":")[0]) as staged:
        addresses = [main.data_ptr(), deepstack.data_ptr()]
        await mooncake.write(staged, session, [staged.main, staged.deepstack], addresses)
    return torch.cat([main, deepstack], 1)


async def test_p25_more_rows_at_once_than_the_buffer_holds(mooncake: Mooncake) -> None:
    """32 times 117 KiB for three hosts, in their dtype."""
    items = [torch.randn(10_000, 6) for _ in range(32)]
    sending = (send(mooncake, f"10.0.0.{index % 3}:5", rows) for index, rows in enumerate(items))
    for rows, received in zip(items, await asyncio.gather(*sending), strict=True):
        assert torch.equal(received, rows.bfloat16())
    await until(lambda: not mooncake.held_bytes)


async def test_p17_a_host_leaves_half_of_the_buffer_to_others(mooncake: Mooncake) -> None:
    rows = torch.zeros(300, 512, dtype=torch.bfloat16)  # 300 KiB
    release, entered = asyncio.Event(), list[str]()

    async def hold(host: str) -> None:
        async with mooncake.staged(rows, 256, torch.bfloat16, host):
            entered.append(host)
            await release.wait()

    holders = [asyncio.create_task(hold(host)) for host in ("a", "a", "a", "b", "c")]
    await until(lambda: len(entered) == 3)
    assert sorted(entered) == ["a", "b", "c"]
    assert mooncake.held_bytes == 3 * rows.nbytes
    release.set()
    await asyncio.gather(*holders)
    assert sorted(entered) == ["a", "a", "a", "b", "c"]
    await until(lambda: not mooncake.held_bytes)
    with pytest.raises(TransportUnavailable, match="have 1049600 bytes, tokenspeed_send_bytes is 1048576"):
        async with mooncake.staged(torch.zeros(1025, 512), 256, torch.bfloat16, "a"):
            pass


async def test_memory_of_a_failed_write_is_reused_after_a_quarantine(
    mooncake: Mooncake, fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUARANTINE_S", 0.1)
    fake.refused.add("10.0.0.1:5")
    with pytest.raises(TransportUnavailable, match=r"write 288 bytes to 10\.0\.0\.1:5: status -1"):
        await send(mooncake, "10.0.0.1:5")
    await asyncio.sleep(0.01)
    assert mooncake.held_bytes == 288, "the write may still read"
    await until(lambda: not mooncake.held_bytes)


async def test_p17_a_host_that_does_not_answer_delays_no_other(
    mooncake: Mooncake, fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows keep their memory while Mooncake may read it, also where their callers have left."""
    monkeypatch.setattr(module, "QUARANTINE_S", 0.0)
    silent, answered = "10.0.0.2:5", threading.Event()
    fake.silent[silent] = answered
    waiting = [asyncio.create_task(send(mooncake, silent)) for _ in range(8)]
    await until(lambda: mooncake.held_bytes == 8 * 288 and fake.written)
    for _ in range(2):  # the second to a session that has answered
        assert torch.equal(await send(mooncake, "10.0.0.1:5"), RECEIVED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert fake.sessions.count(silent) == 1, "the others were given up before their write"
    await until(lambda: mooncake.held_bytes == 288)
    answered.set()
    await until(lambda: not mooncake.held_bytes)


async def test_hosts_have_engines_of_their_own_up_to_a_limit(
    mooncake: Mooncake, fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENGINES", 2)
    mooncake = new_mooncake()
    fake.started.clear()
    for host in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        assert torch.equal(await send(mooncake, f"{host}:5"), RECEIVED)
    assert fake.started == [("127.0.0.1", "P2PHANDSHAKE", "tcp", "")], "beside the first"
    assert not fake.registered
    mooncake.close()


async def test_p46_over_rdma_the_send_buffer_alone_is_registered(fake: FakeMooncake) -> None:
    mooncake = new_mooncake(tokenspeed_rdma="mlx5_0")
    ((address, num_bytes),) = fake.registered
    assert num_bytes == SIZE_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert torch.equal(await send(mooncake, f"127.0.0.1:{port}"), RECEIVED)
    assert all(address <= source < address + num_bytes for _, sources in fake.written for source in sources)
    with pytest.raises(TransportUnavailable, match="does not answer"):
        await send(mooncake, f"127.0.0.2:{port}")
    assert fake.sessions == [f"127.0.0.1:{port}"], "nothing is written to a host that takes no connection"
    assert fake.started == [("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0")]
    mooncake.close()


@pytest.mark.parametrize(
    ("rdma", "changed", "text"),
    [
        ("auto", {"num_refused_registrations": 1}, f"cannot register {SIZE_BYTES} bytes of host memory"),
        ("mlx5_1", {"topology": '{"cpu:0": [[], []]}'}, "'mlx5_1', and Mooncake finds no such device"),
    ],
)
def test_a_start_without_rdma_fails(
    fake: FakeMooncake, rdma: str, changed: dict[str, object], text: str
) -> None:
    vars(fake).update(changed)
    with pytest.raises(ConfigurationError, match=text):
        new_mooncake(tokenspeed_rdma=rdma)


def test_a_start_without_mooncake_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigurationError, match=r"needs Mooncake.*serve,tokenspeed\]"):
        new_mooncake()
