"""Who is answered by the admin plane: hosts, tokens, origins. And how often metrics are rendered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from encoder_service.admin.app import EXPOSE_EVERY_S, Exposition, create_admin_app
from encoder_service.admin.plane import AdminGuard
from encoder_service.ops.metrics import Metrics

pytestmark = pytest.mark.anyio


def web(scheme: str = "http", token: str = "") -> httpx.AsyncClient:
    readiness: Any = SimpleNamespace(is_alive=lambda: True, not_ready=None, info=None)
    metrics = Metrics()
    guard = AdminGuard(create_admin_app(readiness, metrics), token, "plane.example", metrics)
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=f"{scheme}://127.0.0.1:8080")


KNOWN = [
    "127.0.0.1:8080", "10.1.2.3", "203.0.113.9:80", "[::1]:8080", "[2001:db8::1]", "localhost",
    "LocalHost:8080", "localhost.", "encoder", "encoder:8080", "plane.example:8080",
    "encoder.models.svc:8080",
    "encoder-0.encoder.models.svc.cluster.local", "host.docker.internal:8080",
]  # fmt: skip
FOREIGN = [
    "evil.example:8080", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example.",
    "evil.svc.example", "svc.example", "127.1.1", "127.0.0.256", "1.2.3.4.5", "user@localhost", "localhost/",
    "", "local host", "localhost:8080:8080", "[::1", "[::1].evil.example", "evil.example#.svc",
    "plane.example.evil",
]  # fmt: skip


@pytest.mark.parametrize("host", KNOWN)
async def test_p74_addresses_and_private_names_are_answered(host: str) -> None:
    async with web() as client:
        assert (await client.get("/metrics", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("token", ["", "secret"])
async def test_p74_other_hosts_are_refused_with_words_and_health_is_not(token: str) -> None:
    requests = (("GET", "/metrics"), ("GET", "/"), ("GET", "/v1/info"), ("POST", "/v1/playground"))
    async with web(token=token) as client:
        for host in FOREIGN:
            headers = {"host": host, "origin": f"http://{host}", "authorization": "Bearer secret"}
            for method, path in requests:
                refused = await client.request(method, path, headers=headers)
                assert (refused.status_code, host) == (421, host)
                assert "use its address, localhost" in refused.text
            for path in ("/healthz", "/readyz"):
                assert (await client.get(path, headers=headers)).status_code == 200


async def test_a_refused_request_is_in_the_log_and_counted() -> None:
    metrics = Metrics()
    readiness: Any = SimpleNamespace(is_alive=lambda: True, not_ready=None, info=None)
    guard = AdminGuard(create_admin_app(readiness, metrics), "secret", "plane.example", metrics)
    transport = httpx.ASGITransport(guard, client=("10.0.0.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        with capture_logs() as logs:
            assert (await client.get("/metrics")).status_code == 401
    (line,) = logs
    assert (line["log_level"], line["peer"], line["reason"]) == (
        "warning", "10.0.0.7:4711", "UNAUTHENTICATED",
    )  # fmt: skip
    assert metrics.registry.get_sample_value("ve_call_failures_total", {"reason": "UNAUTHENTICATED"}) == 1


async def test_p74_over_tls_the_certificate_names_the_host() -> None:
    async with web("https") as client:
        assert (await client.get("/metrics", headers={"host": "encoder.example"})).status_code == 200


@pytest.mark.parametrize(
    ("scheme", "host", "origin", "is_own"),
    [
        ("http", "localhost:8080", "http://localhost:8080", True),
        ("http", "LOCALHOST:8080", "http://localhost:8080", True),
        ("https", "localhost:8080", "https://localhost:8080", True),
        ("http", "localhost:8080", "https://localhost:8080", False),
        ("http", "localhost:8080", "http://localhost:8081", False),
        ("http", "localhost:8080", "http://localhost", False),
        ("http", "localhost:8080", "http://evil.example:8080", False),
        ("http", "localhost:8080", "null", False),
        ("http", "localhost:8080", "", False),
    ],
)
async def test_a_page_of_another_origin_changes_nothing(
    scheme: str, host: str, origin: str, is_own: bool
) -> None:
    async with web(scheme) as client:
        answer = await client.post("/v1/info", headers={"host": host, "origin": origin})
        assert answer.status_code == (405 if is_own else 403)


@pytest.mark.parametrize("offered", ["Basic \xe9", "Basic w6k=", "Basic /w==", "Bearer \xe9", "Basic", ""])
async def test_a_token_in_no_known_form_is_none(offered: str) -> None:
    async with web(token="secret") as client:
        headers = {b"authorization": offered.encode("latin-1")}
        assert (await client.get("/metrics", headers=headers)).status_code == 401


class CountedMetrics(Metrics):
    num_rendered = 0

    def exposition(self) -> bytes:
        self.num_rendered += 1
        return b"%d" % self.num_rendered


async def test_metrics_are_rendered_at_most_each_tenth_of_a_second() -> None:
    """For readers in a loop; each gets figures that are not older than its request."""
    metrics = CountedMetrics()
    exposition, loop = Exposition(metrics), asyncio.get_running_loop()
    begun_s = loop.time()

    async def read_in_a_loop() -> list[bytes]:
        return [await exposition.text() for _ in range(3)]

    found = await asyncio.gather(*(read_in_a_loop() for _ in range(8)))
    assert found == [[b"1", b"2", b"3"]] * 8
    assert loop.time() - begun_s >= 2 * EXPOSE_EVERY_S * 0.95


async def test_a_reader_that_leaves_takes_nobody_elses_metrics_away() -> None:
    exposition = Exposition(CountedMetrics())
    await exposition.text()
    leaving, staying = [asyncio.ensure_future(exposition.text()) for _ in range(2)]
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"2"
