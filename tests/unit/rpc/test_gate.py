"""Who holds what a call takes, and the limit on calls in progress with its shares."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from encoder_service.errors import TooManyCalls
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc.auth import check_caller, holder_of_caller, host_of
from encoder_service.rpc.gate import CallPermits
from encoder_service.rpc.observed import Call


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:4711", "fd00::7"),
        ("ipv6:%5Bfe80::7%25eth0%5D:4711", "fe80::7%eth0"),
        ("unix:", "unix"),
        ("unix:/run/a.sock", "unix"),
    ],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_p69_a_holder_is_its_token_or_its_address(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("a=one\nb=two\nb=both\na=both\n")
    tokens = NamespaceTokens(file)
    holders = {
        token: holder_of_caller(check_caller(tokens, token), "h") for token in ("one", "both", "", "no")
    }
    assert holders == {"one": ("token a",), "both": ("token a,b",), "": ("peer h",), "no": ("peer h",)}
    call = Call("Encode", "id", host="h", tokens=tokens)
    assert call.holder_of("a") == ("namespace a",)
    assert call.holder_of("made up") == ("peer h", "namespace made up")


def test_p69_one_holder_never_has_all_calls() -> None:
    permits = CallPermits(4096)
    with contextlib.ExitStack() as open_:
        for _ in range(3072):
            open_.enter_context(permits.call(("token a",)))
        with pytest.raises(TooManyCalls, match="3072 calls are in progress, 3072 of them") as caught:
            open_.enter_context(permits.call(("token a",)))
        assert caught.value.details == {"num_calls": "3072", "num_own_calls": "3072", "max_calls": "4096"}
        assert caught.value.retry_after_ms
        for _ in range(512):
            open_.enter_context(permits.call(("peer 10.0.0.7",)))
    assert permits.num_calls == 0
