"""How a client is secured: TLS files, the token's header, the trace, and files that change while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from lm_adapter import ClientTls, InvalidRequest, VisionEncoderClient, channel
from lm_adapter.channel import bearer, read_token_file
from lm_adapter.testing import FakeEncoder
from tests.certificates import Authority


def test_the_token_becomes_a_bearer_header() -> None:
    assert bearer("") == ()
    assert bearer("abc._~+/=-1") == (("authorization", "Bearer abc._~+/=-1"),)
    for bad in ("a b", "a\nb", "ä", "a\x7f"):
        with pytest.raises(InvalidRequest, match="printable ASCII") as caught:
            bearer(bad)
        assert bad not in str(caught.value)


def test_settings_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    for half in ({"cert": "c.pem"}, {"key": "k.pem"}):
        with pytest.raises(InvalidRequest, match="together"):
            ClientTls(**half)
    (tmp_path / "token").write_text("abc")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        VisionEncoderClient("127.0.0.1:1", token="a", token_file=tmp_path / "token")


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.pem"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(ca=tmp_path / "none.pem"))
    with pytest.raises(InvalidRequest, match="cannot read"):
        VisionEncoderClient("127.0.0.1:1", token_file=tmp_path / "none")


def test_a_token_file_has_one_word(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" abc\n")
    assert read_token_file(path) == "abc"
    for content, wrong in ((b"", "0 words"), (b"a b", "2 words"), (b"\xff", "ASCII"), (b"x" * 5000, "4096")):
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match=wrong) as caught:
            read_token_file(path)
        assert content == b"" or content.decode(errors="replace") not in str(caught.value)


def test_keys_and_authorities_are_checked_before_they_are_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    (tmp_path / "empty.pem").touch()
    with pytest.raises(InvalidRequest, match="are not a certificate and its key"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(authority.ca, own.cert, other.key))
    with pytest.raises(InvalidRequest, match=r"empty\.pem has no certificate"):
        VisionEncoderClient("127.0.0.1:1", tls=ClientTls(tmp_path / "empty.pem"))
    VisionEncoderClient("127.0.0.1:1", tls=ClientTls(authority.ca, own.cert, own.key)).close()


def test_a_changed_token_file_is_used_for_new_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced through a link, as Kubernetes does it; a file that is wrong leaves what was."""
    monkeypatch.setattr(channel, "RECHECK_S", 0.0)
    for name in ("first", "second", "two words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
        os.utime(tmp_path / name / "token", (1, 1))
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "token").symlink_to("..data/token")
    with FakeEncoder() as fake, VisionEncoderClient(fake.target, token_file=tmp_path / "token") as client:
        for name in ("first", "second", "two words"):
            (tmp_path / "..new").symlink_to(name)
            (tmp_path / "..new").rename(tmp_path / "..data")
            client.info()
        assert [call.metadata["authorization"] for call in fake.calls] == [
            "Bearer first",
            "Bearer second",
            "Bearer second",
        ]


def test_calls_carry_the_trace_of_the_callers_span() -> None:
    tracer = TracerProvider().get_tracer("test")
    with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
        with tracer.start_as_current_span("caller") as span:
            context: Any = span.get_span_context()
            client.info()
        client.info()
        traced, plain = fake.calls
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert traced.metadata["traceparent"] == expected
    assert "traceparent" not in plain.metadata
