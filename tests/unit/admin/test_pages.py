"""The page's files: served with their policy, and nothing else."""

from __future__ import annotations

from importlib import resources
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from encoder_service.admin.app import FILES, create_admin_app
from encoder_service.ops.metrics import MAX_RECENT, Metrics, RecentTimes
from encoder_service.types import CacheTier, StageTimings

pytestmark = pytest.mark.anyio
READINESS: Any = SimpleNamespace(is_alive=lambda: True, not_ready=None)
FOLDER = resources.files("encoder_service.admin") / "static"


def web(metrics: Metrics | None = None) -> httpx.AsyncClient:
    app = create_admin_app(READINESS, metrics or Metrics())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def test_every_file_comes_with_its_type_and_a_policy_that_allows_no_other_host() -> None:
    assert sorted(FILES) == sorted(entry.name for entry in FOLDER.iterdir())
    async with web() as client:
        paths = {"/": "text/html", **{f"/static/{name}": kind for name, kind in FILES.items()}}
        for path, kind in paths.items():
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind.split(";")[0])
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "%2e%2e/app.py", "..%2fapp.py", ""])
async def test_nothing_else_is_served(name: str) -> None:
    async with web() as client:
        assert (await client.get(f"/static/{name}")).status_code == 404


async def test_times_are_those_that_were_observed() -> None:
    """Not a bucket's bounds, nor between them. Times of a chart's point are those since the point before."""
    metrics = Metrics()
    async with web(metrics) as client:
        first = (await client.get("/v1/times")).json()
        assert (first["stages"], first["num_total"], first["new"]) == ({}, 0, None)
        for total_ms in (33.2, 7.1, 8.3):
            metrics.observe_result(CacheTier.MISS, 1, StageTimings(total_ms=total_ms))
        metrics.observe_delivery("inline", 0.0123)
        second = (await client.get("/v1/times", params={"after": first["num_total"]})).json()
        total = {
            "passed": 3,
            "p50": pytest.approx(8.3),
            "p90": pytest.approx(33.2),
            "p99": pytest.approx(33.2),
        }
        assert second["stages"]["total"] == total == second["new"]
        assert second["stages"]["delivery"]["p50"] == pytest.approx(12.3)
        metrics.observe_result(CacheTier.HOST, 1, StageTimings(total_ms=0.4))
        third = (await client.get("/v1/times", params={"after": second["num_total"]})).json()
        assert (third["new"]["passed"], third["new"]["p99"]) == (1, pytest.approx(0.4))
        assert third["stages"]["total"]["passed"] == 4
        last = (await client.get("/v1/times", params={"after": third["num_total"]})).json()
        assert last["new"] is None


def test_times_of_a_flood_are_the_last_ones_of_the_last_minute() -> None:
    now_s = 0.0
    recent = RecentTimes(lambda: now_s)
    for number in range(2 * MAX_RECENT):
        recent.add("total", number)
    now_s = 50.0
    recent.add("total", 5.0)
    assert recent.within(60)["total"]["passed"] == MAX_RECENT
    assert recent.within(60)["total"]["p50"] == pytest.approx(1.5e3 * MAX_RECENT, rel=0.01)
    assert recent.within(10)["total"] == {"passed": 1, "p50": 5e3, "p90": 5e3, "p99": 5e3}
    assert recent.total_after(0) == recent.within(60)["total"]
    now_s = 200.0
    assert recent.within(60) == {}
    assert recent.total_after(recent.num_total + 7) is None  # a number from before the service's restart
