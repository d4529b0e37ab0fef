"""Certificate files: read, checked, followed; half a rotation changes nothing."""

from __future__ import annotations

import datetime
import shutil
import ssl
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from encoder_service.errors import ConfigurationError
from encoder_service.ops.reloaded import Reloaded
from encoder_service.ops.tls import Certificates, certificate_files
from tests.certificates import DAY, Authority


def recheck(files: Reloaded[Certificates]) -> None:
    """What the thread does in a second."""
    files.check()
    files.check()


def test_files_are_followed_and_half_a_rotation_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    used, other = authority.issue("used"), authority.issue("other")
    files = certificate_files(used.cert, used.key, authority.ca)
    first = files.current()
    assert first.chain == used.cert.read_bytes()
    assert first.client_ca
    shutil.copy(other.cert, used.cert)
    assert files.current() is first
    recheck(files)
    assert files.current() is first  # its key is not there yet
    shutil.copy(other.key, used.key)
    recheck(files)
    second = files.current()
    assert (second.chain, second.key) == (other.cert.read_bytes(), other.key.read_bytes())
    used.cert.unlink()
    recheck(files)
    assert files.current() is second


def test_what_is_no_certificate_is_refused_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(ConfigurationError, match="not a certificate and its key"):
        certificate_files(one.cert, two.key)
    with pytest.raises(ConfigurationError, match=r"cannot read .*none"):
        certificate_files(tmp_path / "none", one.key)
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigurationError, match="authority is not a certificate"):
        certificate_files(one.cert, one.key, tmp_path / "junk")


def test_p68_a_certificate_outside_its_dates_is_warned_of(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority(tmp_path)
    expired = authority.issue("expired", valid_until=now - DAY / 2)
    good = authority.issue("good")
    with capture_logs() as logs:
        files = certificate_files(expired.cert, expired.key)
        shutil.copy(good.cert, expired.cert)
        shutil.copy(good.key, expired.key)
        recheck(files)
        early = authority.issue("expired", valid_from=now + DAY / 2)
        assert early == expired
        recheck(files)
    said = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in said] == [
        "the certificate has expired",
        "the certificate is not valid yet",
    ]
    assert ssl.cert_time_to_seconds(said[0]["expired_at"]) == int((now - DAY / 2).timestamp())
