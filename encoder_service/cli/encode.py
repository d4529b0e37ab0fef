"""``vision-encoder encode``: images and clips to rows, any number of them.

Owns the command and its run: a bounded number of items at a time, what is skipped because its rows are there,
and which failures are an item's own and which end the run. ``inputs`` names what is encoded, ``rows_output``
writes rows, ``encode_report`` shows what came."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encoder_service.cli.connection import Connection, calls_a_service
from encoder_service.cli.encode_report import Report, RunEnded
from encoder_service.cli.inputs import CLIP_SUFFIXES, Source, expand
from encoder_service.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, complain, fail

if TYPE_CHECKING:
    from encoder_service.cli.rows_output import Recorded, RowsOutput, Written
    from lm_adapter import (
        AsyncVisionEncoderClient,
        ClipItem,
        EncodedRows,
        EncoderError,
        ImageItem,
        ModelInfo,
        PreprocessOptions,
        UrlItem,
    )

# How a clip's file begins: Matroska and WebM; boxes of MP4 and MOV, of which one names what follows.
EBML, FIRST_BOXES = b"\x1aE\xdf\xa3", frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"))
STILL_BRANDS = frozenset((b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis"))
TRANSPORTS = ("host", "inline")
"""Rows go to files: a copy in device memory is of no use."""
INFO_S = 30.0
"""How long the server may take to describe itself, at most."""
AWAY_S = 60.0
"""How long a run waits for a server that went away, at most."""
LEAVING = frozenset(("DRAINING", "NOT_READY", "DEVICE_FAULT"))
"""Reasons of items that fail only because their encoder stops or starts."""


@calls_a_service
def encode(
    connection: Connection,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Images, and clips (MP4, MOV, WebM, Matroska): files, folders, quoted patterns such as "
            "'photos/**/*.jpg', URLs that the server may fetch, or - for a list on standard input."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Writes all rows to one safetensors file.")] = None,
    out_dir: Annotated[Path | None, typer.Option(help="Writes a safetensors file per item below it.")] = None,
    shard_size: Annotated[str, typer.Option(help="With --out: files of this size, such as 2GB.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Skips items whose rows are there.")] = False,
    min_pixels: Annotated[int | None, typer.Option(help="Qwen: smallest target area.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Qwen: largest target area.")] = None,
    clip: Annotated[bool, typer.Option("--clip", help="All items are clips, animated GIF too.")] = False,
    fps: Annotated[float | None, typer.Option(help="Clips: frames sampled a second.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Clips: the most frames sampled.")] = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="The server is a gateway: calls are routed.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Items at a time.")] = 32,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds for each item.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON per item, as it comes.")] = False,
) -> None:
    """Encodes images and clips, and shows or writes what came back; exits with 1 when any failed."""
    from encoder_service.cli.rows_output import open_output, size_bytes
    from lm_adapter import AsyncVisionEncoderClient, PreprocessOptions

    try:
        max_bytes = size_bytes(shard_size) if shard_size else None
    except ValueError as error:
        fail(f"--shard-size {error}")
    if out and out_dir:
        fail("--out and --out-dir exclude each other")
    if shard_size and not out:
        fail("--shard-size needs --out")
    if resume and not (out or out_dir):
        fail("--resume needs --out or --out-dir")
    inputs = expand(images)
    for note in inputs.notes:
        complain(note)
    if not inputs.sources:
        fail("nothing to encode: the list is empty")

    options = PreprocessOptions(min_pixels=min_pixels, max_pixels=max_pixels)
    items = Items(options, replace(options, fps=fps, max_frames=max_frames), all_clips=clip)
    report = Report(connection.server, inputs.sources, as_json=as_json)

    async def run() -> None:
        options = connection.client_options(timeout_s)
        options |= {"transports": TRANSPORTS, "max_in_flight": concurrency}
        async with AsyncVisionEncoderClient(connection.server, fleet=fleet, **options) as client:
            info = await client.info(timeout_s=min(timeout_s, INFO_S))
            output = open_output(out, out_dir, max_bytes, inputs.sources, resumes=resume)
            model = info.models[0] if len(info.models) == 1 else None
            job = Run(client, items, output, report, model, connection.namespace, timeout_s)
            await job.encode_all(inputs.sources, concurrency)

    raise typer.Exit(exit_code(run(), report))


def exit_code(run: Coroutine[Any, Any, None], report: Report) -> int:
    """Of a run, once it has ended and its report is shown."""
    from encoder_service.cli.rows_output import CannotWrite
    from lm_adapter import EncoderError

    try:
        asyncio.run(run)
    except EncoderError as error:
        report.end_with(str(error), error)
    except RunEnded as ended:
        report.end_with(str(ended), ended.error)
    except (CannotWrite, OSError) as error:
        report.end_with(str(error))
    except KeyboardInterrupt:
        report.end_with("interrupted")
        return EXIT_INTERRUPTED
    else:
        return report.show()
    return EXIT_FAILED


@dataclass(frozen=True)
class Items:
    """Makes items of sources. all_clips: whatever their files begin with."""

    of_images: PreprocessOptions
    of_clips: PreprocessOptions
    all_clips: bool

    def read(self, source: Source) -> ImageItem | ClipItem | UrlItem:
        """With the digest of a file. Raises ItemFailed for what cannot be read."""
        from lm_adapter import ClipItem, ImageItem, ItemFailed, Modality, UrlItem
        from lm_adapter.keys import content_digest

        if source.problem:
            raise ItemFailed(source.problem, reason="UNREADABLE")
        if source.is_url:
            path = source.name.partition("?")[0].lower()
            if self.all_clips or path.endswith(tuple(CLIP_SUFFIXES)):
                return UrlItem(source.name, options=self.of_clips, modality=Modality.VIDEO)
            return UrlItem(source.name, options=self.of_images)
        try:
            data = Path(source.name).read_bytes()
        except OSError as error:
            raise ItemFailed(error.strerror or str(error), reason="UNREADABLE") from None
        digest = content_digest(data)
        if self.all_clips or begins_as_clip(data):
            return ClipItem(data, digest, self.of_clips)
        return ImageItem(data, digest, self.of_images)


def begins_as_clip(data: bytes) -> bool:
    """Whether a file is MP4, MOV, WebM or Matroska, whatever its name. A GIF or WebP is an image unless
    --clip is given."""
    return data.startswith(EBML) or (data[4:8] in FIRST_BOXES and data[8:12] not in STILL_BRANDS)


class Run:
    """The items of one command on their way. model: the server's, None if it has several."""

    def __init__(
        self,
        client: AsyncVisionEncoderClient,
        items: Items,
        output: RowsOutput | None,
        report: Report,
        model: ModelInfo | None,
        namespace: str,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._items = items
        self._output = output
        self._report = report
        self._model = model
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._is_back = asyncio.Lock()
        self._writing = threading.Lock()
        self._has_ended = False

    async def encode_all(self, sources: Sequence[Source], concurrency: int) -> None:
        """Returns when every item has its outcome. Raises RunEnded."""
        queue = iter(list(enumerate(sources)))
        ended: BaseException | None = None
        with self._report.progress, self._finishing():
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(sources))):
                        group.create_task(self._work(queue))
            except* RunEnded as failures:
                ended = failures.exceptions[0]
            if ended is not None:
                raise ended

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        """Ends the output with the block. A write in progress ends first."""
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            with self._writing:
                self._has_ended = True
                if self._output is not None:
                    self._report.files = self._output.finish(is_whole=is_whole)
                    self._report.index = self._output.index

    async def _work(self, queue: Iterator[tuple[int, Source]]) -> None:
        """Takes items one after another. Only those that workers have taken are in memory."""
        from encoder_service.cli.rows_output import CannotWrite
        from lm_adapter import CallFailed, EncoderError, ItemFailed

        for index, source in queue:
            try:
                item = await asyncio.to_thread(self._items.read, source)
                recorded = None if self._output is None else self._output.recorded(source.name)
                if recorded is not None and self._is_kept(item, recorded):
                    self._report.skipped(index, source, recorded.key)
                    continue
                rows = await self._rows(item)
                written = await asyncio.to_thread(self._write, index, source, rows)
            except (ItemFailed, CallFailed) as error:
                if is_of_every_item(error):
                    raise RunEnded(str(error), error) from error
                self._report.failed(index, source, error)
            except EncoderError as error:
                raise RunEnded(str(error), error) from error
            except CannotWrite as error:
                raise RunEnded(str(error)) from error
            except OSError as error:
                raise RunEnded(f"rows cannot be written: {error.strerror or error}") from error
            else:
                self._report.encoded(index, source, rows, written)

    def _is_kept(self, item: ImageItem | ClipItem | UrlItem, recorded: Recorded) -> bool:
        """Whether the recorded rows are this item's. What is at a URL counts as unchanged. Raises ItemFailed
        for other rows that cannot be replaced."""
        from lm_adapter import ItemFailed
        from lm_adapter.keys import item_key

        assert self._output is not None
        item = replace(item, digest=item.digest or recorded.content_digest)
        if self._model is None:
            same = item.digest == recorded.content_digest
        else:
            same = item_key(item, self._model, namespace=self._namespace) == recorded.key
        if not (same or self._output.replaces):
            raise ItemFailed(
                "the rows there are of other content, options, model or namespace: write to another file, or "
                "write it anew without --resume",
                reason="CHANGED",
            )
        return same

    async def _rows(self, item: ImageItem | ClipItem | UrlItem) -> EncodedRows:
        """Once more if the server went away and is back. Raises EncoderError, and RunEnded if it is not."""
        from lm_adapter import EncoderUnavailable, ItemFailed

        try:
            return await self._client.encode_one(item)
        except (EncoderUnavailable, ItemFailed) as error:
            if isinstance(error, ItemFailed) and error.reason not in LEAVING:
                raise
            await self._wait_until_back(error)
        return await self._client.encode_one(item)

    async def _wait_until_back(self, failure: EncoderError) -> None:
        from lm_adapter import EncoderError

        wait_s = min(self._timeout_s, AWAY_S)
        async with self._is_back:
            self._report.progress.note(f"{failure}; waiting up to {wait_s:g} s for the server")
            try:
                await self._client.wait_ready(wait_s)
            except EncoderError as error:
                raise RunEnded(str(error), error) from failure

    def _write(self, index: int, source: Source, rows: EncodedRows) -> Written | None:
        from encoder_service.cli.rows_files import Entry

        with self._writing:
            if self._output is None or self._has_ended:
                return None
            return self._output.write(Entry(index, source.name, rows))


def is_of_every_item(error: EncoderError) -> bool:
    """Whether a failure would be that of any item. A message may be too large for a proxy on the way."""
    from lm_adapter import ProtocolMismatch, RequestRefused

    is_own = error.retryable or error.reason == "MESSAGE_TOO_LARGE"
    return isinstance(error, ProtocolMismatch | RequestRefused) and not is_own
