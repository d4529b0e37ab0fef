"""The page's files: served with their policy, complete, and asking no other host for anything."""

from __future__ import annotations

import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from encoder_service.ops.admin.app import FILES, create_admin_app
from encoder_service.ops.metrics import Metrics
from encoder_service.types import CacheTier

pytestmark = pytest.mark.anyio
FOLDER = resources.files("encoder_service.ops.admin") / "static"


def web() -> httpx.AsyncClient:
    readiness: Any = SimpleNamespace(is_alive=lambda: True, not_ready_because=lambda: None)
    app = create_admin_app(readiness, Metrics(), dict)
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


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_names_another_host_or_needs_what_the_policy_forbids(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert "eval(" not in text
    assert "innerHTML" not in text  # texts of the service and of files are never markup
    if name.endswith(".html"):
        assert not re.search(r"\son[a-z]+=|\sstyle=|<script>", text)


def test_the_page_names_every_cache_tier_as_the_service_does() -> None:
    live, playground = ((FOLDER / name).read_text() for name in ("live.js", "playground.js"))
    texts = re.search(r"const TIERS = \{(.*?)\};", live, re.DOTALL)
    assert texts is not None
    named = re.findall(r"^\s*(\w+): ", texts[1], re.MULTILINE)
    assert named == [tier.value for tier in CacheTier]
    assert {name for text in (live, playground) for name in re.findall(r"\btiers\.(\w+)", text)} <= set(named)
    # Everywhere else a tier's name is looked up, not written.
    assert not re.search(r"tier\s*===|in_flight", live + playground)
