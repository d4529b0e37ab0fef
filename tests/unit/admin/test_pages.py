"""The page's files: served with their policy, and nothing else."""

from __future__ import annotations

from importlib import resources

import pytest

from encoder_service.admin.app import FILES
from tests.unit.admin.test_playground import web

pytestmark = pytest.mark.anyio
FOLDER = resources.files("encoder_service.admin") / "static"


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
