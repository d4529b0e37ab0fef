"""Tokens: what opens what, a file that changes, and the settings that use them."""

from __future__ import annotations

import gc
import hmac
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bench.harness.waiting import wait_until
from encoder_service.config import parse_settings
from encoder_service.errors import ConfigurationError, PermissionDenied, Unauthenticated
from encoder_service.ops import reloaded
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


def recheck(tokens: NamespaceTokens, times: int = 2) -> None:
    """What the thread does in a second."""
    for _ in range(times):
        tokens._table.check()


def test_the_file_is_read_again_when_it_changes(file: Path, tmp_path: Path) -> None:
    file.write_text("# comment\n\na=one\na=two\n =of-the-default\n")
    tokens = NamespaceTokens(file)
    assert tokens.opens("a", "one")
    assert tokens.opens("a", "two")
    assert tokens.opens("", "of-the-default")
    assert not tokens.opens("", "")
    replaced = tmp_path / "new"
    replaced.write_text("a=three\n")
    os.replace(replaced, file)
    recheck(tokens, 1)
    assert tokens.opens("a", "one")  # it could be half a file
    recheck(tokens, 1)
    assert tokens.opens("a", "three")
    assert not tokens.opens("a", "one")
    assert tokens.names() == {"a"}
    assert not tokens.opens("", "")
    assert not tokens.opens("", "of-the-default")


def test_the_thread_reads_the_file_and_ends_with_the_tokens(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "RECHECK_S", 0.01)
    before = set(threading.enumerate())
    file.write_text("a=one\n")
    kept = [NamespaceTokens(file)]
    (thread,) = set(threading.enumerate()) - before
    file.write_text("a=two\n")
    wait_until(lambda: kept[0].opens("a", "two"))
    kept.clear()
    wait_until(lambda: bool(gc.collect()) or not thread.is_alive())


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(b""),
    "empty lines": lambda file: file.write_bytes(b"\n \n"),
    "a comment": lambda file: file.write_bytes(b"# a=one\n"),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 20 + b"\n"),
    "text": lambda file: file.write_text("no equals sign here\n"),
    "zeros before it": lambda file: file.write_bytes(bytes(64) + b"a=one\n"),
    "half a line": lambda file: file.write_text("other=x\na=on"),
    "half a name": lambda file: file.write_text("other=x\na"),
    "without its last newline": lambda file: file.write_text("a=o"),
    "5 MiB": lambda file: file.write_bytes(b"b=x\n" * (5 << 18)),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "a loop of links": lambda file: (file.unlink(), file.symlink_to(file)),
    "a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("state", BROKEN)
def test_p68_a_file_that_is_not_usable_changes_nothing(file: Path, state: str) -> None:
    file.write_text("a=one\n")
    tokens = NamespaceTokens(file)
    BROKEN[state](file)
    with capture_logs() as logs:
        recheck(tokens, 6)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [
        ("files are not usable, the former contents stay", "warning")
    ]
    assert "one" not in str(logs)
    assert tokens.opens("a", "one")
    for token in ("", "o", "on", "x"):
        assert not tokens.opens("a", token)


def test_p68_a_namespace_that_loses_its_tokens_stays_closed(file: Path) -> None:
    file.write_text("a=one\nb=two\nb=three\n")
    tokens = NamespaceTokens(file)
    file.write_text("b=three\n")
    with capture_logs() as logs:
        recheck(tokens)
    assert [entry["namespaces"] for entry in logs if "namespaces" in entry] == [["a"]]
    for token in ("", "one", "three"):
        assert not tokens.opens("a", token)
    assert [tokens.opens("b", token) for token in ("two", "three")] == [False, True]
    file.write_text("c=four\n")
    recheck(tokens)
    file.write_text("a=five\n")
    recheck(tokens)
    assert tokens.opens("a", "five")
    for namespace in ("b", "c"):
        assert not tokens.opens(namespace, "")
    assert tokens.opens("never had one", "")


def test_p68_a_volume_that_hangs_delays_no_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("a=one\n")
    monkeypatch.setattr(reloaded, "RECHECK_S", 0.01)
    tokens = NamespaceTokens(file)
    reads, goes_on = threading.Event(), threading.Event()

    def hang(_: Path) -> bytes:
        reads.set()
        goes_on.wait(60)
        return b"a=two\n"

    monkeypatch.setattr(reloaded, "read", hang)
    try:
        assert reads.wait(60)
        assert tokens.opens("a", "one")
        assert not tokens.opens("a", "")
    finally:
        goes_on.set()
    wait_until(lambda: tokens.opens("a", "two"))


@pytest.mark.parametrize("open_namespaces", [True, False])
def test_every_answer_costs_the_same_operations(
    file: Path, open_namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("a=one\na=two\na=three\nb=four\n")
    tokens = NamespaceTokens(file, open_namespaces=open_namespaces)
    digested: list[bytes] = []
    real = hmac.digest

    def digest(key: bytes, message: bytes, kind: str) -> bytes:
        digested.append(message)
        return real(key, message, kind)

    monkeypatch.setattr(hmac, "digest", digest)
    monkeypatch.setattr(hmac, "compare_digest", None)
    for namespace in ("a", "b", "unknown"):
        for token in ("one", "two", "wrong", ""):
            tokens.opens(namespace, token)
    assert digested == [b"one", b"two", b"wrong", b""] * 3


def test_the_error_of_a_wrong_file_repeats_no_token(file: Path, tmp_path: Path) -> None:
    for text in ("a=ok\nhush-hush\n", "a=\n", "a=ok\n=\n", "a=ok\nb=hush", "a=hush"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"line [12]") as caught:
            NamespaceTokens(file)
        assert "hush" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="end the file with a newline"):
        NamespaceTokens(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        NamespaceTokens(tmp_path / "none")
    file.write_text("# none yet\n")
    with pytest.raises(ConfigurationError, match="has no tokens"):
        NamespaceTokens(file)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigurationError, match="fifo is not a regular file"):
        NamespaceTokens(tmp_path / "fifo")


def test_tokens_that_open_nothing_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="all calls would fail"):
        open_tokens(parse_settings(model=tmp_path, open_namespaces=False))
    file.write_text("other=x\n")
    given_settings = parse_settings(
        model=tmp_path, broker_path="/b", isolated_namespaces="alone=1048576", tokens_file=file
    )
    with pytest.raises(ConfigurationError, match="need a token: alone"):
        open_tokens(given_settings)
    file.write_text("alone=x\n")
    open_tokens(given_settings)


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
