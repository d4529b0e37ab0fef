"""A server is replaced while its client is idle: no call fails, and the client learns of it all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from lm_adapter import AsyncVisionEncoderClient, EncodedRows, ImageItem, VisionEncoderClient, session
from tests.integration.conftest import running
from tests.integration.images import photo
from tests.unit.transport.broker_rig import socket_folder, wait_until


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "MIN_INFO_AGE_S", 0.0)
    return checkpoints["qwen3_vl"]


@pytest.mark.parametrize("call", ["encode", "prefetch"])
def test_p21_a_client_finds_out_what_the_next_server_offers(
    call: str, checkpoint: Path, device: torch.device, shared_kind: str
) -> None:
    with socket_folder() as folder:
        address = f"unix:{folder / 'service.sock'}"
        with VisionEncoderClient(address, timeout_s=60) as client:
            with running(checkpoint, device, listen=(address,)):
                before = client.encode_one(ImageItem(photo(seed=1)))
                assert client.transport.name == "inline"
            with running(
                checkpoint, device, listen=(address,), broker_path=str(folder / "b.sock"), arena_bytes=8 << 20
            ):
                for _ in range(2):
                    getattr(client, call)([ImageItem(photo(seed=1))])
                wait_until(lambda: client.transport.name == shared_kind, "rows in shared memory")
                after = client.encode_one(ImageItem(photo(seed=1)))
                assert torch.equal(before.torch(), after.torch().cpu())


def test_p21_and_so_does_an_asynchronous_one(
    checkpoint: Path, device: torch.device, shared_kind: str
) -> None:
    async def main() -> None:
        with socket_folder() as folder:
            address = f"unix:{folder / 'service.sock'}"
            async with AsyncVisionEncoderClient(address, timeout_s=60) as client:
                with running(checkpoint, device, listen=(address,)):
                    await client.encode_one(ImageItem(photo(seed=2)))
                    assert client.transport.name == "inline"
                with running(
                    checkpoint,
                    device,
                    listen=(address,),
                    broker_path=str(folder / "b.sock"),
                    arena_bytes=8 << 20,
                ):
                    key = (await client.prefetch([ImageItem(photo(seed=2))]))[0].key  # type: ignore[union-attr]
                    rows = (await client.fetch([key]))[0]
                    assert isinstance(rows, EncodedRows)
                    async with asyncio.timeout(30):
                        while client.transport.name != shared_kind:
                            await client.encode_one(ImageItem(photo(seed=2)))

    asyncio.run(main())


def test_behind_one_address_of_several_servers_not_every_call_asks_anew(
    checkpoint: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MIN_INFO_AGE_S", 3600.0)
    with socket_folder() as folder:
        address = f"unix:{folder / 'service.sock'}"
        with VisionEncoderClient(address, timeout_s=60) as client:
            with running(checkpoint, device, listen=(address,)):
                client.encode_one(ImageItem(photo(seed=3)))
                known = client._session.info
            with running(checkpoint, device, listen=(address,)):
                for seed in (3, 4):
                    client.encode_one(ImageItem(photo(seed=seed)))
                assert client._session.info is known
                monkeypatch.setattr(session, "MIN_INFO_AGE_S", 0.0)
                client.encode_one(ImageItem(photo(seed=3)))
                assert client._session.info is None
