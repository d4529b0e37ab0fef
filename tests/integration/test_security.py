"""TLS, client certificates, tokens: over real sockets, with certificates made here."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from bench.harness.ports import free_port
from bench.harness.waiting import wait_until
from encoder_service.ops import reloaded
from lm_adapter import (
    CallFailed,
    ClientTls,
    EncoderError,
    EncoderUnavailable,
    ImageItem,
    RequestRefused,
    VisionEncoderClient,
    channel,
)
from tests.certificates import Authority
from tests.integration.conftest import RunningService, Serve, tokens_file
from tests.integration.health import health_stub
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

pytestmark = pytest.mark.without_device


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads its files again at every call, the service all the time."""
    monkeypatch.setattr(channel, "RECHECK_S", 0.0)
    monkeypatch.setattr(reloaded, "RECHECK_S", 0.02)


@contextmanager
def secured(serve: Serve, authority: Authority, **settings: object) -> Iterator[RunningService]:
    files = authority.issue("encoder")
    given = {"tls_cert": files.cert, "tls_key": files.key, **settings}
    with serve(**given) as found:
        yield found


def encodes(target: str, tls: ClientTls | None) -> None:
    """Raises what the client raises."""
    with VisionEncoderClient(target, tls=tls, timeout_s=20) as client:
        assert client.encode_one(ImageItem(photo(40, 40))).num_rows > 0


def is_encoded(target: str, tls: ClientTls) -> bool:
    with contextlib.suppress(EncoderUnavailable):
        encodes(target, tls)
        return True
    return False


def test_tls_on_tcp_clear_on_unix(serve: Serve, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/e.sock")
    with secured(serve, authority, listen=listen) as found:
        tcp, unix = found.service.listen
        encodes(tcp, ClientTls(ca=authority.ca))
        encodes(tcp, ClientTls(ca=authority.ca, server_name="encoder.test"))
        encodes(unix, None)
        for wrong in (
            None,
            ClientTls(ca=stranger.ca),
            ClientTls(),
            ClientTls(ca=authority.ca, server_name="x.y"),
        ):
            with pytest.raises(EncoderUnavailable):
                encodes(tcp, wrong)
        encodes(tcp, ClientTls(ca=authority.ca))


def test_rotated_files_serve_new_connections_and_old_ones_go_on(
    serve: Serve, tmp_path: Path, prompt: None
) -> None:
    first, second = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    with secured(serve, first, admin_tls=True) as found:
        with VisionEncoderClient(found.target, tls=ClientTls(ca=first.ca), timeout_s=20) as old:
            assert old.encode_one(ImageItem(photo(40, 40))).num_rows > 0
            renewed = second.issue("encoder")
            shutil.copy(renewed.cert, tmp_path / "a" / "encoder.pem")
            encodes(found.target, ClientTls(ca=first.ca))  # half a rotation changes nothing
            shutil.copy(renewed.key, tmp_path / "a" / "encoder.key")
            wait_until(lambda: is_encoded(found.target, ClientTls(ca=second.ca)))
            with pytest.raises(EncoderUnavailable):
                encodes(found.target, ClientTls(ca=first.ca))
            assert old.encode_one(ImageItem(photo(40, 40))).num_rows > 0
        admin = f"https://{found.service.addresses['admin']}/readyz"
        assert httpx.get(admin, verify=ssl.create_default_context(cafile=second.ca)).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(admin, verify=ssl.create_default_context(cafile=first.ca))
        with pytest.raises(httpx.HTTPError):
            httpx.get(admin.replace("https", "http"))


def test_clients_follow_their_certificates_and_tokens(serve: Serve, tmp_path: Path, prompt: None) -> None:
    """An encoder is replaced by one with other authorities, certificates and tokens, in the files that the
    client was given at its start. While the files do not belong together, the client keeps the former."""
    first, second = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    own, renewed = first.issue("reader"), second.issue("reader")
    token = tmp_path / "token"
    token.write_text("first-token")
    tokens = tokens_file(tmp_path, "n=first-token")
    target = f"127.0.0.1:{free_port()}"
    settings: dict[str, object] = {"listen": (target,), "open_namespaces": False, "tls_client_ca": first.ca}
    settings["admin_tls"] = True
    tls = ClientTls(first.ca, own.cert, own.key)

    def is_served(client: VisionEncoderClient) -> bool:
        """Of an image that was never seen."""
        return client.encode_one(ImageItem(photo(40, 40, seed=secrets.randbits(30)))).num_rows > 0

    with contextlib.ExitStack() as clients:
        with secured(serve, first, tokens_file=tokens, **settings) as found:
            admin = f"https://{found.service.addresses['admin']}/healthz"  # without a client's certificate
            assert httpx.get(admin, verify=ssl.create_default_context(cafile=first.ca)).status_code == 200
            client = clients.enter_context(
                VisionEncoderClient(target, namespace="n", timeout_s=20, token_file=token, tls=tls)
            )
            assert is_served(client)
            shutil.copy(renewed.cert, own.cert)
            assert is_served(client)
        shutil.copy(renewed.key, own.key)
        shutil.copy(second.ca, first.ca)
        token.write_text("second-token")
        tokens_file(tmp_path, "n=second-token")
        settings |= {"tls_client_ca": second.ca}
        with secured(serve, second, tokens_file=tokens, **settings):
            assert is_served(client)
            with (
                pytest.raises(RequestRefused),
                VisionEncoderClient(
                    target, namespace="n", timeout_s=20, token="first-token", tls=tls
                ) as stale,
            ):
                is_served(stale)


def test_the_admin_plane_s_token(serve: Serve) -> None:
    """Which words are a token, and other origins: tests/unit/admin."""
    token = secrets.token_urlsafe()
    with serve(admin_token=token) as found:
        url = f"http://{found.service.addresses['admin']}"
        assert [httpx.get(url + path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        for path in ("/metrics", "/v1/info", "/", "/nowhere", "/healthz/../metrics", "//healthz"):
            refused = httpx.get(url + path)
            assert refused.status_code == 401, path
            assert "Basic" in refused.headers["www-authenticate"]
        for wrong in ("Bearer wrong", token, f"Bearer {token}x"):
            assert httpx.get(f"{url}/metrics", headers={"authorization": wrong}).status_code == 401
        assert httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {token}"}).status_code == 200
        assert httpx.get(f"{url}/metrics", auth=("anyone", token)).status_code == 200


def status_of(target: str, request: pb.EncodeRequest, *metadata: tuple[str, str]) -> grpc.StatusCode:
    with grpc.insecure_channel(target) as channel:
        call = encoder_pb2_grpc.VisionEncoderStub(channel).Encode(request, timeout=20, metadata=metadata)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code()


def test_p18_tokens_of_namespaces(serve: Serve, tmp_path: Path, prompt: None) -> None:
    token, other = secrets.token_urlsafe(), secrets.token_urlsafe()
    file = tokens_file(tmp_path, f"a={token}", f"b={other}")
    image = photo(40, 40)
    with serve(tokens_file=file) as found:

        def answer(namespace: str, bearer: str = "") -> grpc.StatusCode:
            request = pb.EncodeRequest(
                items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=image)], namespace=namespace
            )
            metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
            return status_of(found.target, request, *metadata)

        assert answer("a", token) is grpc.StatusCode.OK
        assert answer("b", other) is grpc.StatusCode.OK
        assert answer("open") is answer("") is answer("open", "whatever") is grpc.StatusCode.OK
        assert answer("a") is answer("a", "wrong") is grpc.StatusCode.UNAUTHENTICATED
        assert answer("a", other) is answer("b", token) is grpc.StatusCode.PERMISSION_DENIED
        with VisionEncoderClient(found.target, namespace="a", token=token, timeout_s=20) as client:
            key = client.encode_one(ImageItem(image)).key
            assert client.lookup([key])[0].num_rows > 0
            assert client.fetch([key])[0].num_rows > 0  # type: ignore[union-attr]
            client.prefetch([ImageItem(photo(48, 40))])
        with VisionEncoderClient(found.target, namespace="a", token="wrong", timeout_s=20) as client:
            for call in (
                lambda: client.fetch([key]),
                lambda: client.lookup([key]),
                lambda: client.prefetch([ImageItem(image)]),
            ):
                with pytest.raises(RequestRefused) as caught:
                    call()
                assert caught.value.reason == "UNAUTHENTICATED"
                assert token not in str(caught.value)
        renewed = secrets.token_urlsafe()
        tokens_file(tmp_path, f"a={token}", f"b={renewed}")
        wait_until(lambda: answer("b", renewed) is grpc.StatusCode.OK)
        assert answer("b", other) is grpc.StatusCode.UNAUTHENTICATED


def test_closed_namespaces_leave_health_open(serve: Serve, tmp_path: Path) -> None:
    token = secrets.token_urlsafe()
    file = tokens_file(tmp_path, f"a={token}")
    with serve(tokens_file=file, open_namespaces=False) as found:
        with grpc.insecure_channel(found.target) as channel:
            for name in ("", "vision_encoder.v1.VisionEncoder"):
                check = health_pb2.HealthCheckRequest(service=name)
                assert health_stub(channel).Check(check, timeout=10).status == 1
            with pytest.raises(grpc.RpcError) as refused:
                ProtoReflectionDescriptorDatabase(channel).get_services()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for wrong in ("", "wrong"):
            with (
                VisionEncoderClient(found.target, token=wrong, timeout_s=20) as client,
                pytest.raises(CallFailed) as caught,
            ):
                client.info()
            assert caught.value.reason == "UNAUTHENTICATED"
        with VisionEncoderClient(found.target, namespace="b", token=token, timeout_s=20) as client:
            assert client.info().models
            with pytest.raises(EncoderError) as denied:
                client.encode([ImageItem(photo(40, 40))])
            assert denied.value.reason == "PERMISSION_DENIED"
        assert found.metric('ve_refused_calls_total{reason="UNAUTHENTICATED"}') == 3
        assert found.metric('ve_refused_calls_total{reason="PERMISSION_DENIED"}') == 1


def test_a_caller_without_a_token_is_turned_away_before_its_message(serve: Serve, tmp_path: Path) -> None:
    """The answer comes although the request never does."""
    with (
        serve(tokens_file=tokens_file(tmp_path, "a=x"), open_namespaces=False) as found,
        grpc.insecure_channel(found.target) as channel,
    ):
        waiting = iter(threading.Event().wait, True)
        encode: grpc.StreamStreamMultiCallable[Any, Any] = channel.stream_stream(
            "/vision_encoder.v1.VisionEncoder/Encode"
        )
        call = encode(waiting, timeout=20)
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
