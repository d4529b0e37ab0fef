"""gRPC's own ring hash: that it works where it is enough, and what it does not do (docs/fleet.md says
both)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_adapter import calls
from lm_adapter.errors import InvalidRequest
from lm_adapter.transport import channel

ROOT = Path(__file__).resolve().parents[2]


def test_it_keeps_keys_and_survives_a_stop_but_sees_no_new_replica_and_no_drain() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fleet.grpc_ring"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["same_again"]
    assert len(found["shares"]) == 4
    assert found["failed_after_one_stopped"] == 0
    assert found["replicas_used_after_it_stopped"] == 7
    # Why there is a client of our own. A gRPC that does better makes this fail, and the page is to be
    # changed.
    assert found["replicas_used_after_scaling_4_to_8"] == 4
    assert found["failed_while_one_of_4_drains"] > 0


def test_without_the_environment_it_is_refused_before_every_call_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(channel.RING_HASH_ENVIRONMENT, raising=False)
    with pytest.raises(InvalidRequest, match=channel.RING_HASH_ENVIRONMENT):
        channel.ring_hash_options()


def test_the_header_of_the_policy_is_the_one_that_calls_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel.RING_HASH_ENVIRONMENT, "true")
    policy = json.loads(str(channel.ring_hash_options()["grpc.service_config"]))
    (config,) = policy["loadBalancingConfig"]
    assert config == {"ring_hash_experimental": {"requestHashHeader": calls.DIGEST_HEADER}}
    assert channel.DIGEST_HEADER == calls.DIGEST_HEADER
