"""The client commands against a service with TLS, client certificates and tokens."""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.certificates import Authority
from tests.integration.conftest import running, tokens_file
from tests.integration.images import photo
from tests.integration.test_process import ENV, ROOT, client_command

pytestmark = pytest.mark.without_device

TOKEN = secrets.token_hex(16)
VARIABLE = "VISION_ENCODER_TOKEN"


class Closed(NamedTuple):
    """A service that opens to one token and to certificates of one authority, and what it takes to reach
    it."""

    target: str
    tls: tuple[object, ...]
    only_ca: tuple[object, ...]
    stranger_ca: Path
    image: Path
    token_file: Path


@pytest.fixture(scope="module")
def closed(
    checkpoints: dict[str, Path], device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    authority, stranger = Authority(folder / "a"), Authority(folder / "b")
    files, own = authority.issue("encoder"), authority.issue("client")
    image, token_file = folder / "image.jpg", folder / "token"
    image.write_bytes(photo(60, 40))
    token_file.write_text(f"{TOKEN}\n")
    with running(
        checkpoints["qwen3_vl"],
        device,
        tls_cert=files.cert,
        tls_key=files.key,
        tls_client_ca=authority.ca,
        tokens_file=tokens_file(folder, f"tenant={TOKEN}", f"other={secrets.token_hex(16)}"),
        open_namespaces=False,
    ) as found:
        only_ca = ("--server", found.target, "--ca", authority.ca)
        yield Closed(
            found.target,
            (*only_ca, "--cert", own.cert, "--key", own.key),
            only_ca,
            stranger.ca,
            image,
            token_file,
        )


def test_info_says_whether_a_namespace_opens(closed: Closed) -> None:
    """By a file; and each way in which it does not."""
    token = ("--token-file", closed.token_file)
    done = client_command("info", *closed.tls, *token, "--namespace", "tenant")
    assert done.exit_code == 0, done.stderr
    assert "'tenant' is open to this caller" in done.stdout
    for namespace in ("other", "nobody"):
        refused = client_command("info", *closed.tls, *token, "--namespace", namespace)
        assert refused.exit_code == 1
        assert "PERMISSION_DENIED" in refused.stderr
    refused = client_command("info", *closed.tls)
    assert refused.exit_code == 1
    assert "UNAUTHENTICATED" in refused.stderr


def test_the_commands_of_the_page_work(closed: Closed, tmp_path: Path) -> None:
    """docs/operations.md, with the address and the files of this test."""
    page = (ROOT / "docs" / "operations.md").read_text()
    lines = re.findall(r"^vision-encoder (\S+ --server encoder\.example.*)$", page, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["encode", "info", "health"]
    given = dict(zip(closed.tls[::2], closed.tls[1::2], strict=True))
    for option, name in (("--ca", "ca.pem"), ("--cert", "client.pem"), ("--key", "client.key")):
        shutil.copy(str(given[option]), tmp_path / name)
    shutil.copy(closed.image, tmp_path / "cat.jpg")
    for line in lines:
        words = shlex.split(line.replace("encoder.example:50051", closed.target))
        done = subprocess.run(
            [sys.executable, "-m", "encoder_service", *words],
            cwd=tmp_path,
            env={**ENV, VARIABLE: TOKEN},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
