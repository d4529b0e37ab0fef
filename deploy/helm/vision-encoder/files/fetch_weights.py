"""Fetches a checkpoint's files over HTTP into a folder: the init container of ``weights.source: fetch``.

Owns the list of files with their SHA-256 (the output of ``sha256sum``), the checks, and the resumption of an
interrupted run. Standard library only. A file gets its final name once its digest is right: the service
never loads half a file.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0
MAX_PAUSE_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchFailed(Exception):
    """The message names the file and the reason."""


class NoRedirectOfToken(urllib.request.HTTPRedirectHandler):
    """Drops the token on the way to another host, and refuses redirects from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("https", old.scheme):
            raise FetchFailed(f"{req.full_url} redirects from {old.scheme} to {new.scheme}")
        again = super().redirect_request(req, fp, code, msg, headers, newurl)
        if again is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            again.remove_header("Authorization")
        return again


def read_sums(text: str) -> dict[str, str]:
    """SHA-256 by file name. Raises FetchFailed for a malformed line, or a name outside the folder."""
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"([0-9a-f]{64}) [ *](\S+)", line.rstrip())
        if not found:
            raise FetchFailed(f"line {number} is no SHA-256, two spaces and a name: {line!r}")
        digest, name = found.groups()
        if name.startswith("/") or ".." in Path(name).parts:
            raise FetchFailed(f"line {number}: {name!r} leads out of the folder")
        if name in sums:
            raise FetchFailed(f"line {number}: {name!r} is listed twice")
        sums[name] = digest
    if not sums:
        raise FetchFailed(
            "SHA256SUMS names no file: it needs the output of `sha256sum *` in the checkpoint's folder"
        )
    return sums


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_file(url: str, target: Path, digest: str, token: str) -> int:
    """Returns the bytes received. Resumes a partial file where the server supports it.

    Raises FetchFailed for a wrong digest, OSError or HTTPException for a failed transfer."""
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    start = partial.stat().st_size if partial.exists() else 0
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    moved = 0
    try:
        with urllib.request.build_opener(NoRedirectOfToken).open(request, timeout=TIMEOUT_S) as answer:
            going_on = answer.status == 206
            with partial.open("ab" if going_on else "wb") as file:
                while chunk := answer.read(CHUNK_BYTES):
                    file.write(chunk)
                    moved += len(chunk)
            expected = answer.headers.get("Content-Length")
            if expected is not None and moved != int(expected):
                raise ConnectionError(f"{moved} bytes came, {expected} were announced")
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416:
                raise
        # Range not satisfiable: the partial file is complete, or of another version.
    found = sha256_of(partial)
    if found != digest:
        partial.unlink()
        raise FetchFailed(f"{url} has SHA-256 {found}, SHA256SUMS says {digest}")
    partial.replace(target)
    return moved


def check_address(base_url: str, token: str) -> None:
    """Raises FetchFailed without repeating a token, password or signature: the message is logged."""
    parts = urllib.parse.urlsplit(base_url)
    if "@" in parts.netloc:
        raise FetchFailed("the URL has a user or a password in it: give a token in its place")
    if parts.query or parts.fragment:
        raise FetchFailed("the URL has a query or a fragment: names of files cannot come after it")
    if parts.scheme not in ("https", "http") or not parts.netloc:
        raise FetchFailed(f"{base_url!r} is no http:// or https:// URL")
    if not all("!" <= letter <= "~" for letter in token):
        raise FetchFailed("the token has white space in it, or a character that no header has")


def fetch_all(
    base_url: str,
    sums: Mapping[str, str],
    folder: Path,
    *,
    token: str = "",
    attempts: int = 5,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Returns the bytes received. Keeps files that have the right digest.

    A broken connection and a status of 5xx or 429 are tried again, others raise FetchFailed."""
    check_address(base_url, token)
    moved = 0
    for name, digest in sums.items():
        target = folder / name
        if target.exists() and sha256_of(target) == digest:
            print(f"{name}: already there", flush=True)
            continue
        url = f"{base_url.rstrip('/')}/{urllib.parse.quote(name)}"
        for attempt in range(1, attempts + 1):
            try:
                moved += fetch_file(url, target, digest, token)
                break
            except (OSError, HTTPException) as error:
                if getattr(error, "errno", None) in NO_ROOM:
                    raise FetchFailed(f"{name}: {error}: the volume is too small") from error
                code = getattr(error, "code", None)
                if attempt == attempts or (code is not None and code < 500 and code != 429):
                    raise FetchFailed(f"{url}: {error}, attempt {attempt} of {attempts}") from error
                pause(min(MAX_PAUSE_S, 2.0**attempt))
        print(f"{name}: fetched", flush=True)
    return moved


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch a checkpoint from WEIGHTS_URL, with WEIGHTS_TOKEN.")
    parser.add_argument("--sums", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    # As a container's first process it would ignore a signal without a handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        sums = read_sums(given.sums.read_text())
        base_url = os.environ.get("WEIGHTS_URL", "")
        # Secrets made from files often end in a line feed.
        moved = fetch_all(base_url, sums, given.into, token=os.environ.get("WEIGHTS_TOKEN", "").strip())
    except FetchFailed as error:
        print(f"fetch-weights: {error}", file=sys.stderr)
        return 1
    print(f"{len(sums)} files, {moved} bytes fetched")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
