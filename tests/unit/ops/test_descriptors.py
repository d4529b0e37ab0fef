"""Descriptors: the limit at start, and listening without any left."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from encoder_service.config import Settings, parse_settings
from encoder_service.startup import within_descriptors


@pytest.mark.parametrize(("limits", "expected"), [("-Sn 100", "hard"), ("-n 300", "300")])
def test_p71_the_soft_limit_is_raised_to_the_hard_one(limits: str, expected: str) -> None:
    code = "from encoder_service.ops.descriptors import raise_limit as r; import resource as m; "
    code += "print(r(), m.getrlimit(m.RLIMIT_NOFILE)[0])"
    ended = subprocess.run(
        ["bash", "-c", f'ulimit {limits}; exec "$0" -c "{code}"', sys.executable],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 1 << 20
    wanted = str(most if hard == resource.RLIM_INFINITY else min(hard, most))
    assert ended.stdout.split() == [wanted if expected == "hard" else expected] * 2


def test_p71_connections_of_http_count_too(tmp_path: Path) -> None:
    given: dict[str, object] = {"model": tmp_path, "listen": "127.0.0.1:0", "broker_path": ""}
    without, with_http = (
        within_descriptors(parse_settings(**given, http_listen=address), 1024)
        for address in ("", "127.0.0.1:0")
    )
    assert with_http.max_connections == int((1024 - 256) / 3.25)
    assert without.max_connections == int((1024 - 256) / 2.25)


def test_p71_connections_fit_into_the_descriptors(tmp_path: Path) -> None:
    def fitted(limit: int, **given: object) -> tuple[Settings, list[str]]:
        given = {"broker_path": "", **given}
        settings = parse_settings(model=tmp_path, listen="127.0.0.1:0,unix:/a", **given)
        with capture_logs() as logs:
            found = within_descriptors(settings, limit)
        return found, [f"{entry['needed']} {entry['limit']}" for entry in logs]

    assert fitted(1 << 20)[1] == []
    assert fitted(1 << 20)[0].max_connections == 1024
    found, said = fitted(1024)
    assert found.max_connections == int((1024 - 256) / 3.5)
    assert said == [f"{256 + 3.5 * 1024:.0f} 1024"]
    everything = {
        "broker_path": "/b", "url_allow": "a.test", "serve_sglang": "127.0.0.1:0",
        "serve_tokenspeed": "127.0.0.1:0",
    }  # fmt: skip
    assert fitted(8192, **everything)[0].max_connections < 1024
    assert fitted(64, **everything)[0].max_connections == 2
