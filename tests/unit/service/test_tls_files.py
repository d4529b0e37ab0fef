"""Certificate files: read, checked, followed; half a rotation changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from encoder_service.errors import ConfigurationError
from encoder_service.ops.tls import certificate_files
from tests.certificates import Authority


def test_files_are_followed_and_half_a_rotation_is_not(tmp_path: Path) -> None:
    now = [0.0]
    authority = Authority(tmp_path)
    used, other = authority.issue("used"), authority.issue("other")
    files = certificate_files(used.cert, used.key, authority.ca, clock=lambda: now[0])
    first = files.current()
    assert first.chain == used.cert.read_bytes()
    assert first.client_ca
    shutil.copy(other.cert, used.cert)
    assert files.current() is first
    now[0] += 2
    assert files.current() is first  # its key is not there yet
    shutil.copy(other.key, used.key)
    now[0] += 2
    second = files.current()
    assert (second.chain, second.key) == (other.cert.read_bytes(), other.key.read_bytes())
    used.cert.unlink()
    now[0] += 2
    assert files.current() is second


def test_what_is_no_certificate_is_refused_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(ConfigurationError, match="no certificate and its key"):
        certificate_files(one.cert, two.key)
    with pytest.raises(ConfigurationError, match=r"cannot read .*none"):
        certificate_files(tmp_path / "none", one.key)
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigurationError, match="authority is no certificate"):
        certificate_files(one.cert, one.key, tmp_path / "junk")
