"""Tokens: what opens what, a file that changes, and the settings that use them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError, PermissionDenied, Unauthenticated
from encoder_service.ops.reloaded import MAX_FILE_BYTES, read
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc.auth import bearer_token, check_caller, check_namespace
from encoder_service.rpc.server import is_reachable, open_tokens


def metadata(*values: object) -> tuple[tuple[str, object], ...]:
    """What ``bearer_token`` reads of a call."""
    return (("user-agent", "test"), *(("authorization", value) for value in values))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def test_a_namespace_with_a_token_is_closed_to_others(file: Path) -> None:
    first, second, other = secrets.token_urlsafe(), secrets.token_urlsafe(), secrets.token_urlsafe()
    file.write_text(f"a={first}\na={second}\nb={other}\n")
    tokens = NamespaceTokens(file)
    for token in (first, second):
        assert tokens.opens("a", token)
    for token in (other, "", first[:-1], first + "x", first.swapcase(), "ä" * 40):
        assert not tokens.opens("a", token)
    assert tokens.opens("nobody's", "")
    assert tokens.opens("nobody's", "anything")
    assert not NamespaceTokens(file, open_namespaces=False).opens("nobody's", first)


def test_p18_a_wrong_token_looks_like_a_namespace_that_is_not_there(file: Path) -> None:
    file.write_text("a=right-a\nb=right-b\n")
    tokens = NamespaceTokens(file, open_namespaces=False)

    def answer(token: str, namespace: str) -> tuple[type[Exception], str]:
        with pytest.raises((Unauthenticated, PermissionDenied)) as caught:
            check_namespace(tokens, token, namespace)
        return type(caught.value), str(caught.value).replace(repr(namespace), "NAME")

    for token in ("", "wrong", "right-b"):
        assert answer(token, "a") == answer(token, "there-is-none")
    assert answer("", "a")[0] is answer("wrong", "a")[0] is Unauthenticated
    assert answer("right-b", "a")[0] is PermissionDenied
    check_namespace(tokens, "right-a", "a")
    check_caller(tokens, "right-b")
    for token in ("", "wrong"):
        with pytest.raises(Unauthenticated):
            check_caller(tokens, token)
    check_caller(NamespaceTokens(file), "")


def test_bearer_tokens_are_read_strictly() -> None:
    assert bearer_token(metadata()) == ""  # type: ignore[arg-type]
    assert bearer_token(metadata("Bearer abc=")) == "abc="  # type: ignore[arg-type]
    assert bearer_token(metadata("bearer  abc")) == "abc"  # type: ignore[arg-type]
    for bad in (
        ("Basic abc",),
        ("Bearer",),
        ("Bearer ",),
        ("abc",),
        (b"Bearer x",),
        ("Bearer a", "Bearer a"),
    ):
        with pytest.raises(Unauthenticated):
            bearer_token(metadata(*bad))  # type: ignore[arg-type]
    with pytest.raises(Unauthenticated, match="5000 bytes"):
        bearer_token(metadata("Bearer " + "a" * 5000))  # type: ignore[arg-type]


def test_the_file_is_read_again_when_it_changes(file: Path, tmp_path: Path) -> None:
    now = [0.0]
    file.write_text("# comment\n\na=one\na=two\n =of-the-default\n")
    tokens = NamespaceTokens(file, clock=lambda: now[0])
    assert tokens.opens("a", "one")
    assert tokens.opens("a", "two")
    assert tokens.opens("", "of-the-default")
    assert not tokens.opens("", "")
    replaced = tmp_path / "new"
    replaced.write_text("a=three\n")
    os.replace(replaced, file)
    assert tokens.opens("a", "one")  # not looked at yet
    now[0] += 1.5
    assert tokens.opens("a", "three")
    assert not tokens.opens("a", "one")
    assert tokens.names() == {"a"}
    file.write_text("no equals sign here\n")
    now[0] += 1.5
    assert tokens.opens("a", "three")  # a file that is wrong changes nothing
    file.unlink()
    now[0] += 1.5
    assert tokens.opens("a", "three")


def test_the_error_of_a_wrong_file_repeats_no_token(file: Path, tmp_path: Path) -> None:
    for text in ("a=ok\nhush-hush\n", "a=\n", "a=ok\n=\n"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"line [12]") as caught:
            NamespaceTokens(file)
        assert "hush" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        NamespaceTokens(tmp_path / "none")


def test_tokens_that_open_nothing_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="all calls would fail"):
        open_tokens(parse_settings(model=tmp_path, open_namespaces=False))
    file.write_text("other=x\n")
    settings = parse_settings(
        model=tmp_path, broker_path="/b", isolated_namespaces="alone=1048576", tokens_file=file
    )
    with pytest.raises(ConfigurationError, match="need a token: alone"):
        open_tokens(settings)
    file.write_text("alone=x\n")
    open_tokens(settings)


def test_which_addresses_other_hosts_reach() -> None:
    assert [is_reachable(address) for address in ("unix:/a", "127.0.0.1:1", "[::1]:1", "localhost:1")] == [
        False
    ] * 4
    assert [is_reachable(address) for address in ("0.0.0.0:1", "[::]:1", "encoder:1", "10.0.0.1:1")] == [
        True
    ] * 4


def test_p17_a_file_above_the_limit_is_refused(file: Path) -> None:
    file.write_bytes(bytes(MAX_FILE_BYTES))
    assert len(read(file)) == MAX_FILE_BYTES
    file.write_bytes(bytes(MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigurationError, match=f"more than {MAX_FILE_BYTES} bytes"):
        read(file)
