"""Starts encoders as processes of their own, each a fork of this one, which has imported the service.

Owns their start and what a test may do to them: marked images that crash their encoder or take long, and a
delay of every item. The service itself knows nothing of it; the patches are here. Commands come as JSON lines
on the standard input; each is answered with the process id of the new encoder. Encoders end with this
process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness.fleet.images import CRASH, HOLD
from encoder_service.cli.serve import leave
from encoder_service.config import parse_settings
from encoder_service.errors import StartupError
from encoder_service.ingest.preprocessor import OpenItem, Preprocessor
from encoder_service.ops.logs import configure_logs
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.serve import serve
from encoder_service.types import EncodedFile, Item, LoadedPixels

SLOW_S = 0.4
ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended encoders are reaped at once
    for number in ENDING:  # the end of the input ends this process, whatever a terminal sends to its group
        signal.signal(number, signal.SIG_IGN)
    encoders: list[int] = []
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become_encoder(Path(command["log"]), command["settings"])
        encoders.append(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in encoders:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def become_encoder(log: Path, settings: dict[str, Any]) -> None:
    """What ``vision-encoder serve`` does, with the patches. Never returns."""
    for number in (signal.SIGCHLD, *ENDING):
        signal.signal(number, signal.SIG_DFL)
    with log.open("ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()
    patch(log.with_suffix(".crashes"))
    try:
        parsed = parse_settings(**settings)
        configure_logs(parsed.log_format, parsed.log_level)
        code = asyncio.run(serve(parsed))
    except StartupError as error:
        leave(2, f"cannot start: {error.message}")
    leave(code)


def is_first(folder: Path, data: bytes) -> bool:
    """Whether no encoder with logs in this folder was asked for the file before."""
    try:
        (folder / f"{zlib.crc32(data):08x}.held").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def patch(crashes: Path) -> None:
    """Marks in a file's bytes have their effect when it is decoded; SIGUSR1 turns the delay on and off."""
    open_item, encode = Preprocessor.open, Pipeline.encode
    slow = False

    def toggle(*_: object) -> None:
        nonlocal slow
        slow = not slow

    def marked_open(self: Preprocessor, item: Item) -> OpenItem:
        data = item.content.data if isinstance(item.content, EncodedFile) else b""
        opened = open_item(self, item)
        return replace(opened, load=functools.partial(marked_load, data, opened.load))

    def marked_load(data: bytes, load: Callable[[], LoadedPixels]) -> LoadedPixels:
        if CRASH in data:
            with crashes.open("a") as file:
                file.write("asked\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if HOLD in data and is_first(crashes.parent, data):
            time.sleep(int(data.partition(HOLD)[2][:2]))
        return load()

    async def delayed_encode(self: Pipeline, item: Item, **options: Any) -> EncodeResult:
        if slow:
            await asyncio.sleep(SLOW_S)
        return await encode(self, item, **options)

    signal.signal(signal.SIGUSR1, toggle)
    Preprocessor.open = marked_open  # type: ignore[method-assign]
    Pipeline.encode = delayed_encode  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
