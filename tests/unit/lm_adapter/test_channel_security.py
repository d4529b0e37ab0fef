"""How a client is secured: TLS files, the token's header, what is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from lm_adapter import ClientTls, InvalidRequest, VisionEncoderClient
from lm_adapter.transport.channel import bearer, channel_credentials, channel_options


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
        channel_credentials(grpc.ssl_channel_credentials(), ClientTls())
    assert channel_credentials(None, None) is None


def test_the_server_s_name_can_be_another_than_the_target_s() -> None:
    named = dict(channel_options(None, ClientTls(server_name="encoder.internal")))
    assert named["grpc.ssl_target_name_override"] == "encoder.internal"
    assert "grpc.ssl_target_name_override" not in dict(channel_options(None, ClientTls()))
