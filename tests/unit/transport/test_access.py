"""Who is let in: versions, user ids, tokens, and what a refusal tells."""

from __future__ import annotations

import os
import socket

import pytest

from encoder_service.transport.access import (
    BrokerAccess,
    PeerCredentials,
    common_version,
    peer_credentials,
)
from tests.unit.transport.broker_rig import hello

TOKENS = BrokerAccess(tokens={"a": "secret-a", "b": "secret-b"})


def reason(access: BrokerAccess, **given: object) -> str | None:
    refusal = access.refuse_hello(hello(**given))
    return None if refusal is None else refusal.reason


def test_the_kernel_says_who_the_peer_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_credentials(ours) == PeerCredentials(os.getpid(), os.getuid(), os.getgid())


@pytest.mark.parametrize(
    ("namespace", "token", "expected"),
    [
        ("a", "secret-a", None),
        ("b", "secret-b", None),
        ("a", "secret-b", "UNAUTHENTICATED"),
        ("a", "", "UNAUTHENTICATED"),
        ("a", "secret-", "UNAUTHENTICATED"),
        ("", "", "UNAUTHENTICATED"),
        ("c", "secret-a", "UNAUTHENTICATED"),
    ],
)
def test_a_token_opens_its_own_namespace(namespace: str, token: str, expected: str | None) -> None:
    assert reason(TOKENS, namespace=namespace, token=token) == expected


def test_p18_an_unknown_namespace_and_a_wrong_token_get_the_same_words() -> None:
    wrong = TOKENS.refuse_hello(hello(namespace="a", token="x"))
    unknown = TOKENS.refuse_hello(hello(namespace="z", token="x"))
    assert wrong is not None
    assert unknown is not None
    assert wrong.message.replace("'a'", "'z'") == unknown.message


def test_open_namespaces_open_only_those_without_a_token() -> None:
    access = BrokerAccess(tokens={"a": "secret"}, open_namespaces=True)
    assert reason(access, namespace="other") is None
    assert reason(access, namespace="a") == "UNAUTHENTICATED"


def test_an_empty_token_that_is_configured_is_a_token_still() -> None:
    access = BrokerAccess(tokens={"a": ""})
    assert reason(access, namespace="a", token="") is None
    assert reason(access, namespace="a", token="x") == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("newest", "oldest", "expected"),
    [(1, 1, None), (9, 1, None), (9, 2, "PROTOCOL_MISMATCH"), (0, 0, "PROTOCOL_MISMATCH")],
)
def test_p35_versions_must_overlap(newest: int, oldest: int, expected: str | None) -> None:
    given = hello(protocol_version=newest, min_protocol_version=oldest)
    refusal = BrokerAccess(open_namespaces=True).refuse_hello(given)
    assert (None if refusal is None else refusal.reason) == expected
    if refusal is None:
        assert common_version(given) == 1
    else:
        assert f"{oldest} to {newest}" in refusal.message
        assert "1 to 1" in refusal.message


def test_long_names_are_refused_with_both_numbers() -> None:
    refusal = BrokerAccess(open_namespaces=True).refuse_hello(hello(namespace="n" * 129))
    assert refusal is not None
    assert refusal.reason == "INVALID_REQUEST"
    assert "129 characters, at most 128" in refusal.message


def test_user_ids_are_the_kernels() -> None:
    peer = PeerCredentials(1, 1000, 1000)
    assert BrokerAccess().refuse_peer(peer) is None
    assert BrokerAccess(allowed_uids=frozenset({0, 1000})).refuse_peer(peer) is None
    refusal = BrokerAccess(allowed_uids=frozenset({7, 3})).refuse_peer(peer)
    assert refusal is not None
    assert refusal.reason == "UID_NOT_ALLOWED"
    assert refusal.message == "user id 1000 may not connect, allowed: 3, 7"


def test_tokens_do_not_show_in_logs() -> None:
    assert "secret" not in repr(TOKENS)
