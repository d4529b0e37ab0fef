"""The service over real sockets: calls, health, admin plane, concurrency, faults."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bench.harness.waiting import wait_until
from encoder_service import __version__
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.launch import Launched, TowerLauncher
from encoder_service.errors import ConfigurationError, StartupError
from lm_adapter import (
    CacheTier,
    EncodedRows,
    ImageItem,
    ItemFailed,
    KeyState,
    PrefetchStatus,
    VisionEncoderClient,
)
from tests.families import REPRESENTATIVE
from tests.integration.conftest import RunningService, Serve, connected, running
from tests.integration.health import health_of
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb


def payload_of(rows: EncodedRows) -> bytes:
    assert isinstance(rows.payload, np.ndarray)
    return rows.payload.tobytes()


def figures(service: RunningService) -> dict[str, float]:
    text = httpx.get(f"http://{service.service.addresses['admin']}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_family_miss_hit_lookup_fetch_prefetch(
    family: str, checkpoints: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    sockets = ("127.0.0.1:0", f"unix:{tmp_path}/encoder.sock")
    with running(checkpoints[family], device, listen=sockets) as found:
        for target in found.service.listen:
            with VisionEncoderClient(target, timeout_s=60) as client:
                data = photo(160, 90)
                first, again = client.encode([ImageItem(data), ImageItem(data)])
                assert isinstance(first, EncodedRows)
                assert isinstance(again, EncodedRows)
                assert {first.tier, again.tier} == {CacheTier.MISS, CacheTier.IN_FLIGHT}
                third = client.encode_one(ImageItem(data))
                assert third.tier is CacheTier.HOST
                assert payload_of(first) == payload_of(again) == payload_of(third)
                assert np.isfinite(first.numpy()).all()
                info = client.info()
                assert info.models[0].family == family
                assert first.width == info.models[0].width

                (announced,) = client.prefetch([ImageItem(photo(90, 160))])
                assert isinstance(announced, PrefetchStatus)
                (fetched,) = client.fetch([announced.key])
                assert isinstance(fetched, EncodedRows)
                assert fetched.grid_thw == announced.grid_thw
                assert fetched.num_rows == announced.num_rows
                states = client.lookup([first.key, announced.key, bytes(32)])
                assert [status.state for status in states] == [
                    KeyState.RESIDENT,
                    KeyState.RESIDENT,
                    KeyState.ABSENT,
                ]
    assert not (tmp_path / "encoder.sock").exists()


def test_a_prefetch_until_encoded_says_what_became_of_each_item(service: RunningService) -> None:
    """A damaged file's header is sound: a plain prefetch would have announced it."""
    files = photo(150, 90), photo(90, 150)[:-400]
    items = [pb.Item(modality=pb.MODALITY_IMAGE, encoded=data) for data in files]
    with connected(service) as stub:
        request = pb.PrefetchRequest(items=items, until_encoded=True)
        good, bad = stub.Prefetch(request, timeout=30).statuses
        (again,) = stub.Prefetch(pb.PrefetchRequest(items=items[:1]), timeout=30).statuses
    assert good.state == pb.KEY_STATE_RESIDENT
    assert good == again
    assert bad.failure.reason == "UNDECODABLE_IMAGE"


def test_a_prefetch_until_encoded_does_not_claim_rows_that_were_not_kept(serve: Serve) -> None:
    image = pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo(1200, 1200))
    with (
        serve(arena_bytes=1 << 20) as service,
        connected(service) as stub,
    ):
        request = pb.PrefetchRequest(items=[image], until_encoded=True)
        (status,) = stub.Prefetch(request, timeout=60).statuses
    assert status.failure.reason == "STORE_FULL"
    assert status.failure.retryable
    assert int(status.failure.details["needed_bytes"]) > 1 << 20


def test_a_warm_up_that_fails_is_a_start_that_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(engine: DeviceEngine, grids: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceEngine, "warm_up", warm_up)
    with (
        pytest.raises(StartupError, match="OutOfMemoryError: CUDA out of memory"),
        serve(),
    ):
        pass


def test_admin_plane(service: RunningService, client: VisionEncoderClient) -> None:
    client.encode([ImageItem(photo()), ImageItem(b"no image")])
    base = f"http://{service.service.addresses['admin']}"
    assert httpx.get(f"{base}/healthz").json() == {"status": "alive"}
    assert httpx.get(f"{base}/readyz").json() == {"status": "ready"}
    info = httpx.get(f"{base}/v1/info").json()
    assert bytes.fromhex(info["models"][0]["model_fingerprint"]) == client.info().models[0].model_fingerprint
    assert info["limits"]["max_items_per_request"] == 256
    found = figures(service)
    assert found["ve_ready"] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert not [name for name in found if "_created" in name]
    (build,) = (name for name in found if name.startswith("ve_build_info{"))
    for fact in ('model="qwen3_vl"', 'family="qwen3_vl"', 'dtype="float32"', f'version="{__version__}"'):
        assert fact in build
    assert found['ve_item_failures_total{reason="UNDECODABLE_IMAGE"}'] >= 1
    assert found['ve_stage_seconds_count{stage="tower"}'] >= 1
    assert found["ve_queued_patches"] == 0


def test_p27_p36_not_ready_before_the_warm_up_is_done_and_never_behind_a_busy_device(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with serve() as found:
        launch = TowerLauncher.launch

        def wait_then_launch(*arguments: Any) -> Launched:
            assert gate.wait(60)
            return launch(*arguments)

        monkeypatch.setattr(TowerLauncher, "launch", wait_then_launch)
        base = f"http://{found.service.addresses['admin']}"
        with VisionEncoderClient(found.target, timeout_s=60) as client, ThreadPoolExecutor(1) as pool:
            pending = pool.submit(client.encode_one, ImageItem(photo()))
            started = time.monotonic()
            for path in ("healthz", "readyz", "metrics", "v1/info"):
                assert httpx.get(f"{base}/{path}").status_code == 200
            assert health_of(found.target) == 1
            assert time.monotonic() - started < 5
            assert not pending.done()
            gate.set()
            assert pending.result(30)


def test_p32_p36_a_device_fault_tells_callers_at_once_and_leaves_service(
    serve: Serve, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as found:

        def broken(*_: object) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(TowerLauncher, "launch", broken)
        with VisionEncoderClient(found.target, timeout_s=30) as client:
            (failed,) = client.encode([ImageItem(photo())])
        assert isinstance(failed, ItemFailed)
        assert failed.reason == "DEVICE_FAULT"
        assert failed.retryable
        wait_until(lambda: not found.service.is_alive())
        assert found.service.not_ready == "device fault"


def test_addresses_that_cannot_be_bound(service: RunningService, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for settings in (
        {"listen": (service.target,)},
        {"admin_listen": service.service.addresses["admin"]},
        {"listen": (f"unix:{tmp_path}/file",)},
        {"listen": (f"unix:{tmp_path}/missing/x.sock",)},
    ):
        with (
            pytest.raises(ConfigurationError, match="cannot listen on"),
            serve(**settings),
        ):
            pass
