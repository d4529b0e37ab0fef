"""vLLM whose encoders are behind a gateway: they change while it runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.waiting import wait_until
from lm_adapter.keys import content_digest
from tests.engines.conftest import DTYPES
from tests.engines.pictures import CASES, TEXT, picture, with_pixels
from tests.engines.replicas import Replicas
from tests.engines.stack import Stack

FAMILY = "qwen3_vl"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def replicas(
    family: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    with Replicas(checkpoints[family], DTYPES[family], tmp_path_factory.mktemp("replicas")) as running:
        yield running


@pytest.fixture(scope="module")
def routed(
    replicas: Replicas,
    family: str,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """It starts while its encoders are away."""
    folder = tmp_path_factory.mktemp("routed")
    with Stack(replicas, checkpoints[family], DTYPES[family], folder, fleet=True) as running:
        yield running


def new_picture() -> list[dict[str, Any]]:
    return with_pixels(CASES[0], [picture(random.getrandbits(32))])


def check_away_and_back(replicas: Replicas, routed: Stack) -> None:
    """Without encoders an image's request gets the reason, and text an answer. Those that start are used."""
    away = routed.chat(new_picture())
    assert away.status_code == 503, away.text
    assert "UNAVAILABLE" in away.text
    assert routed.chat(TEXT).status_code == 200
    replicas.start()
    wait_until(lambda: routed.chat(new_picture()).status_code == 200, "an answer of the encoders")


def test_p32_encoders_that_come_later_are_found(replicas: Replicas, routed: Stack) -> None:
    check_away_and_back(replicas, routed)


def test_p32_rows_of_a_replica_that_was_killed_come_from_the_other(replicas: Replicas, routed: Stack) -> None:
    """The picture has another name the second time, so that it is in none of vLLM's caches."""
    replicas.start()
    image = picture(random.getrandbits(32))
    log = replicas.gateway.access_log()

    def tokens_by(name: str) -> list[int]:
        messages = with_pixels(CASES[0], [image])
        messages[0]["content"][0]["uuid"] = name
        tokens: list[int] = routed.answer(messages)["tokens"]
        return tokens

    def next_asked(known: set[str]) -> str:
        """The address of a replica that was asked for the picture, and is none of these."""
        found: set[str] = set()

        def is_logged() -> bool:
            entries = [one for one in log.read() if one["digest"] == content_digest(image).hex()]
            found.update(one["replica"].partition(":")[0] for one in entries if one["grpc_status"] == 0)
            return bool(found - known)

        wait_until(is_logged, "the access log's entries")
        (address,) = found - known
        return address

    tokens = tokens_by("first")
    owner = next_asked(set())
    replicas.kill(owner)
    assert tokens_by("second") == tokens
    next_asked({owner})


def test_p32_requests_fail_while_all_encoders_are_gone(replicas: Replicas, routed: Stack) -> None:
    replicas.stop()
    check_away_and_back(replicas, routed)
