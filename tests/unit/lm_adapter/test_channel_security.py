"""How a client is secured: TLS files, the token's header, what is refused before anything is sent."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from lm_adapter.transport import followed_channel
from lm_adapter.transport.channel import bearer, channel_options, followed_credentials
from lm_adapter.transport.followed import RECHECK_S, Followed, token_in, token_source
from lm_adapter.transport.followed_channel import LINGER_S, FollowedAioChannel, FollowedChannel

from lm_adapter import ClientTls, InvalidRequest, TokenFile, VisionEncoderClient
from tests.certificates import Authority


def test_the_token_becomes_a_bearer_header() -> None:
    assert bearer("") == ()
    assert bearer("abc._~+/=-1") == (("authorization", "Bearer abc._~+/=-1"),)
    for bad in ("a b", "a\nb", "ä", "a\x7f"):
        with pytest.raises(InvalidRequest, match="printable ASCII") as caught:
            bearer(bad)
        assert bad not in str(caught.value)


def test_certificate_and_key_go_together() -> None:
    for half in ({"cert": "c.pem"}, {"key": "k.pem"}):
        with pytest.raises(InvalidRequest, match="together"):
            ClientTls(**half)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*none\.pem"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(ca=tmp_path / "none.pem"))


def test_two_ways_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one"):
        followed_credentials(grpc.ssl_channel_credentials(), ClientTls())
    assert followed_credentials(None, None) is None


def test_the_server_s_name_can_be_another_than_the_target_s() -> None:
    named = dict(channel_options(None, ClientTls(server_name="encoder.internal")))
    assert named["grpc.ssl_target_name_override"] == "encoder.internal"
    assert "grpc.ssl_target_name_override" not in dict(channel_options(None, ClientTls()))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def upper(contents: Any) -> str:
    (text,) = contents
    if text == b"wrong":
        raise InvalidRequest("this is wrong")
    return str(text.decode()).upper()


def test_a_file_is_followed_within_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "file", Clock()
    path.write_text("one")
    followed = Followed([path], upper, what="the file", clock=clock)
    path.write_text("two")
    clock.now_s += 0.99 * RECHECK_S
    assert followed.current() == "ONE"
    clock.now_s += 0.02 * RECHECK_S
    assert followed.current() == "TWO"


def test_a_secret_that_is_swapped_through_links_is_followed(tmp_path: Path) -> None:
    """As Kubernetes does it: a link to a folder, replaced by another; the times of files may be any."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
        os.utime(tmp_path / name / "token", (1, 1))
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "token").symlink_to("..data/token")
    clock = Clock()
    followed = Followed([tmp_path / "token"], upper, what="the file", clock=clock)
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    clock.now_s += RECHECK_S
    assert followed.current() == "SECOND"


def test_what_cannot_be_used_leaves_what_was_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "file", Clock()
    path.write_text("one")
    followed = Followed([path], upper, what="the file", clock=clock)
    with caplog.at_level(logging.INFO, logger="lm_adapter"):
        for content in ("wrong", None, "wrong", "two"):
            if content is None:
                path.unlink()
            else:
                path.write_text(content)
            for _ in range(3):
                clock.now_s += RECHECK_S
                followed.current()
            assert followed.current() == ("TWO" if content == "two" else "ONE")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the file: kept as it was: this is wrong",
        f"the file: kept as it was: cannot read {path}: No such file or directory",
        "the file: kept as it was: this is wrong",
        "the file: read again",
    ]
    path.write_text("wrong")
    with pytest.raises(InvalidRequest, match="this is wrong"):
        Followed([path], upper, what="the file")


def test_files_that_change_while_they_are_checked_are_looked_at_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "file", Clock()
    path.write_text("one")

    def make(contents: Any) -> str:
        if contents == [b"two"]:
            path.write_text("three")
        return upper(contents)

    followed = Followed([path], make, what="the file", clock=clock)
    path.write_text("two")
    clock.now_s += RECHECK_S
    assert followed.current() == "ONE"
    clock.now_s += RECHECK_S
    assert followed.current() == "THREE"


def test_one_thread_looks_and_the_others_have_what_was(tmp_path: Path) -> None:
    path, clock = tmp_path / "file", Clock()
    path.write_text("one")
    looking, go_on = threading.Event(), threading.Event()

    def make(contents: Any) -> str:
        if contents == [b"two"]:
            looking.set()
            assert go_on.wait(20)
        return upper(contents)

    followed = Followed([path], make, what="the file", clock=clock)
    path.write_text("two")
    clock.now_s += RECHECK_S
    thread = threading.Thread(target=followed.current)
    thread.start()
    assert looking.wait(20)
    assert followed.current() == "ONE"
    go_on.set()
    thread.join(20)
    assert followed.current() == "TWO"


def test_a_token_comes_as_text_from_a_file_or_from_a_function(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" abc\n")
    assert token_source("text")() == "text"
    assert token_source(lambda: "made")() == "made"
    assert token_source(TokenFile(path))() == "abc"
    refused = ((b"", "0 words"), (b"a b", "2 words"), (b"\xff", "characters"), (b"x" * 5000, "4096"))
    for content, wrong in refused:
        with pytest.raises(InvalidRequest, match=wrong) as caught:
            token_in(content, "the token")
        assert content == b"" or content.decode(errors="replace") not in str(caught.value)
    with pytest.raises(InvalidRequest, match="empty"):
        TokenFile("")
    with pytest.raises(InvalidRequest, match="cannot read"):
        VisionEncoderClient("127.0.0.1:1", token=TokenFile(tmp_path / "none"))


def test_keys_and_authorities_are_checked_before_they_are_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    (tmp_path / "empty.pem").touch()
    with pytest.raises(InvalidRequest, match="are no certificate and its key"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(authority.ca, own.cert, other.key))
    with pytest.raises(InvalidRequest, match=r"empty\.pem has no certificate"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(tmp_path / "empty.pem"))
    VisionEncoderClient("127.0.0.1:1", tls=ClientTls(authority.ca, own.cert, own.key)).close()


class FakeChannel:
    """Tells which it is, and whether it was closed."""

    def __init__(self, made_of: Any) -> None:
        self.made_of, self.num_closed = made_of, 0

    def unary_unary(self, method: str, **_: Any) -> Any:
        return self, method

    unary_stream = unary_unary

    def close(self) -> None:
        self.num_closed += 1


class FakeAioChannel(FakeChannel):
    async def close(self) -> None:  # type: ignore[override]
        self.num_closed += 1


class Turned:
    """In the place of ``Followed``."""

    def __init__(self) -> None:
        self.value = object()

    def current(self) -> Any:
        return self.value


def test_new_calls_go_over_the_new_channel_and_the_old_one_is_closed_later() -> None:
    files, clock = Turned(), Clock()
    channel = FollowedChannel(files, FakeChannel, clock=clock)  # type: ignore[arg-type]
    first, _ = channel.unary_unary("a")
    assert channel.unary_stream("b") == (first, "b")
    files.value = object()
    second, _ = channel.unary_stream("c")
    assert second is not first
    assert second.made_of is files.value
    clock.now_s += LINGER_S - 1
    assert channel.unary_unary("d")[0] is second
    assert first.num_closed == 0, "calls under way end there"
    clock.now_s += 2
    channel.unary_unary("e")
    assert first.num_closed == 1
    files.value = object()
    third, _ = channel.unary_unary("f")
    channel.close()
    assert (first.num_closed, second.num_closed, third.num_closed) == (1, 1, 1)
    files.value = object()
    assert channel.unary_unary("g")[0] is third, "a closed one makes no other"


def test_threads_that_call_at_once_make_one_channel() -> None:
    files = Turned()
    made: list[FakeChannel] = []

    def connect(secured: Any) -> Any:
        made.append(FakeChannel(secured))
        return made[-1]

    channel = FollowedChannel(files, connect)  # type: ignore[arg-type]
    files.value = object()
    start = threading.Barrier(8)

    def call() -> None:
        start.wait(20)
        channel.unary_unary("a")

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 2


def test_a_thread_that_was_held_up_does_not_go_back_to_older_files() -> None:
    files, old = Turned(), object()
    files.value = old
    channel = FollowedChannel(files, FakeChannel)  # type: ignore[arg-type]
    new = object()
    told = iter([old, new, new, old, new])

    class Held(Turned):
        def current(self) -> Any:
            return next(told)

    channel._files = Held()  # type: ignore[assignment]
    first, _ = channel.unary_unary("a")  # told of the old ones
    second, _ = channel.unary_unary("b")
    assert (first.made_of, second.made_of) == (old, new)
    third, _ = channel.unary_unary(
        "c"
    )  # told of the old ones, and by the time that it has the lock of the new
    assert third is second


@pytest.mark.anyio
async def test_on_a_loop_the_old_channel_is_closed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_channel, "LINGER_S", 0.05)
    files = Turned()
    channel = FollowedAioChannel(files, FakeAioChannel)  # type: ignore[arg-type]
    first, _ = channel.unary_unary("a")
    files.value = object()
    second, _ = channel.unary_stream("b")
    assert second is not first
    assert first.num_closed == 0
    for _ in range(400):
        if first.num_closed:
            break
        await asyncio.sleep(0.01)
    assert (first.num_closed, second.num_closed) == (1, 0)
    monkeypatch.setattr(followed_channel, "LINGER_S", 900.0)
    files.value = object()
    third, _ = channel.unary_unary("c")
    await channel.close()
    assert (first.num_closed, second.num_closed, third.num_closed) == (1, 1, 1)
    files.value = object()
    assert channel.unary_unary("d")[0] is third
