"""Rows through shared host memory, end to end: a service, its broker, and clients of the adapter's parts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch

from encoder_service.store.leases import LeaseTable
from encoder_service.transport.shared_memory import SharedMemory
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from lm_adapter.transport.broker_errors import BrokerError
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.integration.shared_client import ClientProcess, SharedClient
from tests.integration.test_process import ServiceProcess, command
from tests.integration.test_service import figures
from tests.unit.transport.broker_rig import num_descriptors, socket_folder, wait_until
from vision_encoder.v1 import encoder_pb2 as pb

ARENA_BYTES = 8 << 20


class Shared:
    """A service with a broker, in this process."""

    def __init__(self, service: RunningService, broker_path: str) -> None:
        self.service = service
        self.broker_path = broker_path
        assert service.service.shared is not None
        self.memory: SharedMemory = service.service.shared

    def client(self, **given: str) -> SharedClient:
        return SharedClient(self.service.target, self.broker_path, **given)

    def process(self) -> ClientProcess:
        return ClientProcess(self.service.target, self.broker_path)

    def on_loop(self, function: Callable[[], object]) -> object:
        return self.service.on_loop(function)

    @property
    def leases(self) -> LeaseTable:
        return self.memory.leases

    def check(self) -> None:
        """Nothing is held by a delivery or a lease that is over."""
        wait_until(lambda: len(self.leases) == 0, "the end of every lease")
        for part in self.memory.store.parts():
            wait_until(lambda part=part: len(part.arena) == len(part), "the end of every delivery")  # type: ignore[misc]
        self.on_loop(self.memory.store.check_integrity)
        self.on_loop(self.leases.check_integrity)
        assert self.memory.num_integrity_failures == 0


@contextlib.contextmanager
def sharing(model: Path, device: torch.device, **settings: object) -> Iterator[Shared]:
    with socket_folder() as folder:
        path = str(folder / "broker.sock")
        given = {"arena_bytes": ARENA_BYTES, "device_arena_bytes": 0, **settings}
        with running(model, device, broker_path=path, **given) as found:
            yield Shared(found, path)
        assert not Path(path).exists()


@pytest.fixture(scope="module")
def module_shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Shared]:
    with sharing(checkpoints["qwen3_vl"], device) as found:
        yield found


@pytest.fixture
def shared(module_shared: Shared) -> Iterator[Shared]:
    yield module_shared
    module_shared.check()


@pytest.fixture(scope="module")
def processes(module_shared: Shared) -> Iterator[list[ClientProcess]]:
    """Four clients, each a process of its own."""
    found = [module_shared.process() for _ in range(4)]
    yield found
    for process in found:
        process.close()


def test_rows_are_those_of_inline_delivery(shared: Shared) -> None:
    images = [photo(96, 64), photo(320, 160), photo(64, 64)]
    with shared.client() as client:
        outcomes = client.encode(images)
        assert [each.result.WhichOneof("rows") for each in outcomes] == ["host"] * 3
        assert all(not each.inline for each in outcomes)
        read = [client.read(each.result) for each in outcomes]
        inline = client.encode(images, pb.DELIVERY_INLINE)
        assert [each.inline for each in inline] == read
        fetched = client.fetch([each.result.key for each in outcomes])
        assert [client.read(each.result) for each in fetched] == read
        with VisionEncoderClient(shared.service.target, timeout_s=60) as other:
            rows = other.encode_one(ImageItem(images[1]))
        assert rows.payload.tobytes() == read[1]
        lease_ids = [each.result.host.lease_id for each in (*outcomes, *fetched)]
        assert client.release(*lease_ids).num_released == 6
        assert len(set(lease_ids)) == 6


def test_rows_are_those_of_a_service_without_shared_memory(shared: Shared, service: RunningService) -> None:
    image = photo(160, 96)
    with VisionEncoderClient(service.target, timeout_s=60) as other, shared.client() as client:
        assert len(other.info().transports) == 1
        (outcome,) = client.encode([image])
        assert client.read(outcome.result) == other.encode_one(ImageItem(image)).payload.tobytes()


def test_the_server_tells_what_the_broker_tells(shared: Shared) -> None:
    with shared.client() as client:
        info = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        session = client.broker.session
        assert session is not None
        (inline, *devices, host) = info.transports
        assert [each.delivery for each in devices] in ([], [pb.DELIVERY_DEVICE_LEASE])
        assert inline == pb.TransportInfo(delivery=pb.DELIVERY_INLINE)
        assert host.delivery == pb.DELIVERY_HOST_SHM
        assert (host.broker_path, host.host_id) == (shared.broker_path, session.host_id)
        assert info.instance_id == session.instance_id
        assert len(session.arenas) == 1


@pytest.mark.parametrize("owner_id", [b"", b"0" * 32, b"\xff\xfe", b"x" * 5000])
def test_without_a_connection_each_item_fails_alone_and_nothing_is_encoded(
    shared: Shared, owner_id: bytes
) -> None:
    images = [photo(), photo()]
    with shared.client() as client:
        before = figures(shared.service)["ve_encoded_items_total"]
        outcomes = client.encode(images, owner_id=owner_id)
        assert [each.failure.reason for each in outcomes] == ["TRANSPORT_UNAVAILABLE"] * 2
        assert outcomes[0].failure.status == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert not outcomes[0].failure.retryable
        assert figures(shared.service)["ve_encoded_items_total"] == before
        (known,) = client.encode(images[:1], pb.DELIVERY_INLINE)
        (fetched,) = client.fetch([known.result.key], owner_id=owner_id)
        assert fetched.failure.reason == "TRANSPORT_UNAVAILABLE"


def test_p18_an_owner_of_another_namespace_gets_no_lease(shared: Shared) -> None:
    with shared.client(namespace="a") as client, shared.client(namespace="b") as other:
        session = client.broker.session
        assert session is not None
        (outcome,) = other.encode([photo()], owner_id=session.owner_id.encode())
        assert outcome.failure.reason == "TRANSPORT_UNAVAILABLE"


def test_one_bad_item_fails_alone(shared: Shared) -> None:
    with shared.client() as client:
        good, bad = client.encode([photo(), b"no image"])
        assert client.read(good.result) is not None
        assert bad.failure.reason == "UNDECODABLE_IMAGE"


def test_calls_that_have_no_meaning(shared: Shared) -> None:
    with shared.client() as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.encode([photo()], num_readers=257)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            client.encode([photo()], pb.DELIVERY_DEVICE_LEASE)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_release_and_renew(shared: Shared) -> None:
    with shared.client() as client:
        (outcome,) = client.encode([photo()], lease_ms=5000)
        host = outcome.result.host
        now_ms = time.time() * 1e3
        assert now_ms < host.expires_at_unix_ms <= now_ms + 5000
        (status,) = client.renew(host.lease_id, extend_ms=60_000)
        assert now_ms + 59_000 < status.expires_at_unix_ms <= time.time() * 1e3 + 60_000
        limit_ms = shared.service.service.settings.lease_limit_ms
        (status,) = client.renew(host.lease_id, extend_ms=10 * limit_ms)
        assert status.expires_at_unix_ms <= time.time() * 1e3 + limit_ms
        answer = client.release(host.lease_id, b"x" * 16, b"")
        assert answer.num_released == 1
        assert list(answer.unknown_lease_ids) == [b"x" * 16, b""]
        assert client.release(host.lease_id) == pb.ReleaseResponse()
        ended, unknown = client.renew(host.lease_id, b"x" * 16)
        assert (ended.failure.reason, unknown.failure.reason) == ("STALE_LEASE", "UNKNOWN_LEASE")
        assert ended.failure.status == grpc.StatusCode.ABORTED.value[0]
        assert client.read(outcome.result) is not None, "what was given back stays readable while it is kept"


def test_whoever_names_an_owner_is_held_to_it(shared: Shared) -> None:
    with shared.client() as client, shared.client() as other:
        (outcome,) = client.encode([photo()], num_readers=2)
        lease_id, owners = outcome.result.host.lease_id, (client.lease_options(), other.lease_options())
        mine, others = (options.owner_id for options in owners)
        renewal = pb.RenewRequest(lease_ids=[lease_id], extend_ms=1000, owner_id=others)
        (status,) = other.stub.Renew(renewal, timeout=60).statuses
        assert status.failure.reason == "UNKNOWN_LEASE"
        release = pb.ReleaseRequest(lease_ids=[lease_id], reader=1, owner_id=others)
        assert list(other.stub.Release(release, timeout=60).unknown_lease_ids) == [lease_id]
        renewal.owner_id = release.owner_id = mine
        (status,) = other.stub.Renew(renewal, timeout=60).statuses
        assert not status.failure.reason
        assert other.stub.Release(release, timeout=60).num_released == 1, "a reader in another session"
        assert client.release(lease_id, reader=0).num_released == 1
        assert len(shared.leases) == 0


def test_p21_a_lease_that_ran_out_is_stale_to_its_reader(shared: Shared) -> None:
    with shared.client() as client:
        image = photo()
        (outcome,) = client.encode([image], lease_ms=30)
        wait_until(lambda: client.read(outcome.result) is None, "a stale read")
        assert client.release(outcome.result.host.lease_id) == pb.ReleaseResponse()
        (again,) = client.encode([image])
        assert again.result.tier == pb.CACHE_TIER_HOST
        assert client.read(again.result) is not None


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_every_reader_of_a_lease_reads_in_its_own_process(
    shared: Shared, processes: list[ClientProcess], num_readers: int
) -> None:
    """The lease ends with the last of them, and not before."""
    with shared.client() as client:
        (outcome,) = client.encode([photo(128, 128)], num_readers=num_readers)
        expected = client.read(outcome.result)
        assert expected is not None
        result = base64.b64encode(outcome.result.SerializeToString()).decode()
        for reader, process in enumerate(processes[:num_readers]):
            assert len(shared.leases) == 1
            if reader:  # a reader that releases twice releases once
                assert client.release(outcome.result.host.lease_id, reader=0).num_released == 0
            answer = process.ask(do="read", result=result, reader=reader)
            assert answer == {"sha256": hashlib.sha256(expected).hexdigest(), "released": 1}
        assert len(shared.leases) == 0


def test_p21_leases_end_with_their_connection(shared: Shared) -> None:
    with shared.client() as client:
        (stays,) = client.encode([photo()])
        with shared.client() as leaver:
            leaver.encode([photo(), photo()])
            assert len(shared.leases) == 3
        wait_until(lambda: len(shared.leases) == 1, "the end of the leaver's leases")
        assert client.read(stays.result) is not None


def test_p21_leases_end_with_a_client_that_is_killed(shared: Shared) -> None:
    process = shared.process()
    image = photo()
    before = shared.leases.counters.revoked
    answer = process.ask(do="encode", image=base64.b64encode(image).decode(), lease_ms=300_000)
    result = pb.ItemResult.FromString(base64.b64decode(answer["result"]))
    assert result.WhichOneof("rows") == "host"
    assert len(shared.leases) == 1
    process.kill()
    wait_until(lambda: len(shared.leases) == 0, "the end of the killed client's lease")
    assert shared.leases.counters.revoked == before + 1
    with shared.client() as client:
        assert client.read(result) is None, "what the killed client held is stale"
        (outcome,) = client.encode([image])
        assert client.read(outcome.result) is not None


def test_a_call_that_is_cut_off_holds_nothing(shared: Shared) -> None:
    with shared.client() as client:
        request = pb.EncodeRequest(
            items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo(512, 512)) for _ in range(6)]
        )
        call = client.stub.Encode(request, timeout=60)
        next(call)
        call.cancel()
    # ``shared`` checks that no delivery holds a slot.


def assert_same_rows(found: bytes | None, expected: bytes, device: torch.device) -> None:
    """Of one image, in float32. On a GPU one that was evicted and comes again may round otherwise."""
    assert found is not None
    if device.type == "cpu":
        assert found == expected
        return
    rows, right = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found, expected))
    assert rows.shape == right.shape
    assert (rows - right).norm() < 1e-5 * right.norm()


def test_p25_many_clients_at_once(checkpoints: dict[str, Path], device: torch.device) -> None:
    """The arena holds a part of what they ask for, and they leave some of their leases to run out."""
    images = [photo(256, 256) for _ in range(24)]
    with sharing(checkpoints["qwen3_vl"], device, arena_bytes=1 << 20) as shared:
        with VisionEncoderClient(shared.service.target, timeout_s=60) as plain:
            outcomes = plain.encode([ImageItem(image) for image in images])
        expected = [each.payload.tobytes() for each in outcomes if isinstance(each, EncodedRows)]
        assert len(expected) == 24
        assert sum(map(len, expected)) > 1 << 20

        def work(worker: int) -> None:
            with shared.client() as client:
                for turn in range(6):
                    picked = [(worker * 5 + turn * 7 + each) % 24 for each in range(3)]
                    encoded = client.encode([images[index] for index in picked], lease_ms=2000)
                    for index, outcome in zip(picked, encoded, strict=True):
                        assert not outcome.failure.reason
                        found = outcome.inline or client.read(outcome.result)
                        assert_same_rows(found, expected[index], device)
                        if outcome.result.WhichOneof("rows") == "host" and (turn + index) % 4:
                            client.release(outcome.result.host.lease_id)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert shared.memory.store.counters.evictions > 0
        assert shared.memory.counters.shared > 0
        shared.check()


def test_p17_an_arena_full_of_leases_delivers_inline(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    with (
        sharing(checkpoints["qwen3_vl"], device, arena_bytes=1 << 20) as shared,
        shared.client() as client,
    ):
        leased: list[bytes] = []
        while True:
            image = photo(320, 320)
            (outcome,) = client.encode([image])
            if outcome.result.WhichOneof("rows") == "inline":
                break
            leased.append(outcome.result.host.lease_id)
            assert len(leased) < 100
        assert leased
        assert len(outcome.inline) == outcome.result.rows_bytes > 0
        found = figures(shared.service)
        assert found["ve_shared_not_held_total"] == found["ve_store_refused_total"] == 1
        assert found["ve_shared_deliveries_total"] == found["ve_leases"] == len(leased)
        client.release(leased[0])
        (again,) = client.encode([image])
        assert client.read(again.result) == outcome.inline
        client.release(*leased, again.result.host.lease_id)
        shared.check()


def test_p18_isolated_namespaces(checkpoints: dict[str, Path], device: torch.device) -> None:
    image = photo()
    with sharing(
        checkpoints["qwen3_vl"],
        device,
        isolated_namespaces={"alone": 1 << 20},
        broker_tokens={"alone": "secret"},
    ) as shared:
        with pytest.raises(BrokerError, match="token"):
            shared.client(namespace="alone")
        with shared.client() as everyone, shared.client(namespace="alone", token="secret") as alone:
            (public,), (own,) = everyone.encode([image]), alone.encode([image])
            assert public.result.host.arena_id != own.result.host.arena_id
            assert everyone.read(public.result) == alone.read(own.result)
            with pytest.raises(BrokerError, match="no arena"):
                everyone.mapped(own.result.host.arena_id)
            with pytest.raises(BrokerError, match="no arena"):
                alone.mapped(public.result.host.arena_id)
        shared.check()


def test_clients_leave_no_descriptors_behind(shared: Shared) -> None:
    def once() -> None:
        with shared.client() as client:
            (outcome,) = client.encode([photo()])
            assert client.read(outcome.result) is not None

    once()
    wait_until(lambda: shared.memory.broker.num_connections <= 4, "the end of the first")
    before = num_descriptors()
    for _ in range(5):
        once()
    wait_until(lambda: num_descriptors() <= before + 2, "the end of their descriptors")


@pytest.mark.without_device
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--broker-path", "/no/such/folder/broker.sock"), "the folder /no/such/folder does not exist"),
        (("--broker-path", "broker.sock"), "'broker.sock' is no absolute path"),
        (("--broker-path", "/tmp/ve-never.sock", "--arena-bytes", 1 << 60), f"{1 << 60} bytes of shared"),
    ],
)
def test_what_cannot_be_shared_stops_the_start(
    checkpoints: dict[str, Path], arguments: tuple[object, ...], text: str
) -> None:
    model = ("--model", checkpoints["qwen3_vl"], "--listen", "127.0.0.1:0", "--admin-listen", "")
    ended = command("serve", *model, *arguments)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert text in ended.stderr


def start(checkpoint: Path, device: torch.device, broker_path: str, listen: str) -> ServiceProcess:
    return ServiceProcess(
        "--model", checkpoint, "--device", device, "--dtype", "float32", "--listen", listen,
        "--admin-listen", "", "--broker-path", broker_path, "--arena-bytes", ARENA_BYTES,
    )  # fmt: skip


def test_p21_p37_a_service_that_is_killed_started_again_and_stopped(
    checkpoints: dict[str, Path], device: torch.device
) -> None:
    """Old leases and arenas are void, the client's session comes back by itself, rows are the same. A lease
    is honoured while the service stops."""
    with socket_folder() as folder:
        listen, path = f"unix:{folder}/grpc.sock", f"{folder}/broker.sock"
        first = start(checkpoints["qwen3_vl"], device, path, listen)
        image = photo()
        with SharedClient(listen, path) as client:
            (before,) = client.encode([image])
            rows = client.read(before.result)
            assert rows is not None
            old = client.broker.session
            assert old is not None
            _, page = client.mapped(before.result.host.arena_id)
            beat = page.heartbeat
            wait_until(lambda: page.heartbeat > beat, "a heartbeat")
            first.end(signal.SIGKILL)
            assert client.read(before.result) == rows, "the memory outlives its maker"
            second = start(checkpoints["qwen3_vl"], device, path, listen)
            wait_until(lambda: (client.broker.session or old).instance_id != old.instance_id, "a new session")
            session = client.broker.session
            assert session is not None
            assert session.restarted
            (stale,) = client.encode([image], owner_id=old.owner_id.encode())
            assert stale.failure.reason == "TRANSPORT_UNAVAILABLE"
            (status,) = client.renew(before.result.host.lease_id)
            assert status.failure.reason == "UNKNOWN_LEASE"
            (after,) = client.encode([image])
            assert after.result.tier == pb.CACHE_TIER_MISS
            assert after.result.host.arena_id != before.result.host.arena_id
            assert client.read(after.result) == rows
            second.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert second.process.poll() is None, "a lease is out"
            assert client.read(after.result) == rows
            _, page = client.mapped(after.result.host.arena_id)
            released_s = time.monotonic()
            assert client.release(after.result.host.lease_id).num_released == 1
            second.process.communicate(timeout=30)
            assert time.monotonic() - released_s < 10, "the grace is twenty"
            assert second.process.returncode == 0
            assert page.closed
            assert client.read(after.result) is None
