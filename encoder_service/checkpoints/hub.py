"""Checkpoints of the model hub: a folder in the cache with only what a tower needs.

Owns the files and byte ranges that are fetched, the folder in the cache, and errors that say what to do.
``huggingface_hub`` owns the cache, the token, the endpoint and offline mode, each by its own variables;
``towers.checkpoint`` says which tensors are vision tensors; ``vision_file`` lays them out in one file.

The folder is named after the commit and the selection of tensors. It is filled under another name and renamed
when it is complete. It reads like any checkpoint folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import structlog
from huggingface_hub import (
    HfApi,
    cached_assets_path,
    constants,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's or httpx2's: huggingface_hub 2 changed to the latter
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from encoder_service import __version__
from encoder_service.checkpoints.hub_id import HubId
from encoder_service.checkpoints.vision_file import Shard, StoredTensor, VisionFile, read_header
from encoder_service.errors import CheckpointError
from encoder_service.ingest.settings import PREPROCESSOR_FILE, PROCESSOR_FILE, VIDEO_PREPROCESSOR_FILE
from encoder_service.towers.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    Selected,
    check_held,
    check_shapes,
    read_config,
    select_tensors,
    tensor_files,
)
from encoder_service.towers.config import VisionConfig
from encoder_service.towers.registry import parse_config

log = structlog.get_logger(__name__)
# Its lines are those of the log; it would also write them to standard error.
logging.getLogger("huggingface_hub").handlers.clear()

LIBRARY = "vision-encoder"
# Settings of the processors. A checkpoint has some of them.
SETTINGS_FILES = (PREPROCESSOR_FILE, VIDEO_PREPROCESSOR_FILE, PROCESSOR_FILE)
# Without a byte for this long a transfer counts as broken.
TIMEOUT_S = 30.0
# Failures in a row, without a byte in between, until a transfer is given up. Pauses double, from one second.
MAX_FAILURES = 6
REPORT_EVERY_S = 10.0

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")

Result = TypeVar("Result")
# What a request to the hub raises, apart from programming errors.
REQUEST_ERRORS = (HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, HFValidationError)


@dataclass(frozen=True)
class Hub:
    """Access to a hub and to the caches. By default everything follows the variables of ``huggingface_hub``.

    cache_dir, assets_dir: in place of HF_HUB_CACHE and HF_ASSETS_CACHE. pause: waits for seconds.
    """

    api: HfApi = field(default_factory=lambda: HfApi(library_name=LIBRARY, library_version=__version__))
    cache_dir: Path | None = None
    assets_dir: Path | None = None
    pause: Callable[[float], None] = time.sleep

    def url(self, model: HubId, name: str) -> str:
        return str(hf_hub_url(model.repo, name, revision=model.revision, endpoint=self.api.endpoint))

    def cached(self, model: HubId, name: str) -> Path | None:
        """A file of the cache, without a request."""
        path = try_to_load_from_cache(model.repo, name, cache_dir=self.cache_dir, revision=model.revision)
        return Path(path) if isinstance(path, str) else None

    def file(self, model: HubId, name: str) -> Path:
        """A small file, in the cache. Raises REQUEST_ERRORS, and CheckpointError for a wrong digest."""
        path = Path(
            self.api.hf_hub_download(model.repo, name, revision=model.revision, cache_dir=self.cache_dir)
        )
        check_digest(path, self.url(model, name))
        return path

    def shard(self, model: HubId, name: str) -> Shard | None:
        """None if the model has no such file. Raises REQUEST_ERRORS, and CheckpointError without a size."""
        url = self.url(model, name)
        try:
            found = self.retried(lambda: self.api.get_hf_file_metadata(url=url))
        except RemoteEntryNotFoundError:
            return None
        if found.size is None:
            raise CheckpointError(f"{url} is announced without a size")
        digest = found.etag or ""
        return Shard(name, url, found.size, digest if SHA256.fullmatch(digest) else "")

    def read(self, shard: Shard, start: int, end: int) -> Iterator[bytes]:
        """Bytes of a shard from start to end, in pieces. Raises HTTPError for a broken transfer, and
        CheckpointError for an answer without the range."""
        headers = build_hf_headers(
            token=self.api.token,
            library_name=LIBRARY,
            library_version=__version__,
            headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"},
        )
        with get_session().stream("GET", shard.url, headers=headers, timeout=TIMEOUT_S) as response:
            hf_raise_for_status(response)
            needed, found = f"bytes {start}-{end - 1}/{shard.size}", response.headers.get("Content-Range")
            if response.status_code != 206 or found != needed:
                raise CheckpointError(
                    f"{shard.url} was asked for {needed}, and the answer is {response.status_code} with"
                    f" {found}: the server needs to support ranges; otherwise download the whole checkpoint"
                    " and give its folder"
                )
            left = end - start
            for piece in response.iter_raw():  # as it comes: a broken transfer keeps all of it
                left -= len(piece)
                if left < 0:
                    raise CheckpointError(f"{shard.url} sent {-left} bytes more than {needed}")
                yield piece

    def retried(
        self,
        action: Callable[[], Result],
        position: Callable[[], int] = lambda: 0,
        *,
        is_first: bool = False,
    ) -> Result:
        """The action's result. It is tried again after a broken connection and a status of 408, 429 or 5xx;
        gives up after MAX_FAILURES in a row at the same position. is_first: the hub has not answered before,
        so without an answer it is not tried again. Raises REQUEST_ERRORS."""
        failures, last = 0, position()
        while True:
            try:
                return action()
            except HTTPError as error:
                failures = failures + 1 if position() == last else 1
                last = position()
                is_unreachable = is_first and not isinstance(error, HfHubHTTPError)
                if is_unreachable or not is_transient(error) or failures == MAX_FAILURES:
                    raise
                log.warning("a transfer broke off and is continued", error=cause(error))
                self.pause(2.0 ** (failures - 1))


def is_transient(error: HTTPError) -> bool:
    if not isinstance(error, HfHubHTTPError):
        return True
    status = error.response.status_code
    return status in (408, 429) or status >= 500


def cause(error: Exception) -> str:
    """One line. A status stands without its URL, which may be signed for a content network."""
    if isinstance(error, HfHubHTTPError):
        text = f"status {error.response.status_code}"
        return f"{text}, {error.server_message.splitlines()[0]}" if error.server_message else text
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def check_digest(path: Path, url: str) -> None:
    """The cache names content after the hub's digest: SHA-256, or git's SHA-1 of a blob. Removes a file with
    another digest and raises CheckpointError."""
    content = path.resolve()
    if SHA256.fullmatch(content.name):
        with content.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    elif COMMIT.fullmatch(content.name):
        data = content.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    else:
        return
    if found != content.name:
        for file_path in (path, content):
            file_path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{url} was received with digest {found}, the hub says {content.name}: start again to fetch it"
            " again"
        )


def fetch(model: HubId, hub: Hub | None = None) -> Path:
    """The folder of a model's checkpoint. Files that are missing are fetched first.

    Raises CheckpointError, also its subclasses for a checkpoint that no tower here can load.
    """
    hub = hub or Hub()
    disable_progress_bars()  # of the library, for small files
    try:
        return _fetch(model, hub)
    except REQUEST_ERRORS as error:
        raise explained(error, model, hub) from error
    except OSError as error:
        raise CheckpointError(
            f"{model} cannot be written to {error.filename or cache_of(hub)}: {error.strerror or error}"
        ) from error


def _fetch(model: HubId, hub: Hub) -> Path:
    cached = hub.cached(model, CONFIG_FILE)
    if cached is not None and COMMIT.fullmatch(model.revision):  # nothing newer to ask the hub for
        folder, _ = folder_of(model, cached, hub)
        if folder.is_dir():
            return folder
    config_file, unreachable = find_config(model, cached, hub)
    snapshot = config_file.parent
    commit = HubId(model.repo, snapshot.name)
    folder, config = folder_of(commit, config_file, hub)
    if folder.is_dir():
        return folder
    if unreachable is None:
        for name in SETTINGS_FILES:
            with contextlib.suppress(RemoteEntryNotFoundError):
                hub.file(commit, name)
    if has_weights(snapshot, config):
        log.info("the cache has the model's whole shards", model=str(commit), folder=str(snapshot))
        return snapshot
    if unreachable is not None:
        raise unreachable
    with locked(folder):
        if not folder.is_dir():  # another process may have completed it meanwhile
            partial = folder.with_name(f"{folder.name}.partial")
            partial.mkdir(exist_ok=True)
            for name in (CONFIG_FILE, *SETTINGS_FILES):
                if (snapshot / name).is_file():
                    shutil.copyfile(snapshot / name, partial / name)
            fetch_tensors(commit, config, snapshot, partial / WEIGHTS_FILE, hub)
            for path in (*partial.iterdir(), partial):  # a folder that exists counts as whole
                sync(path)
            partial.rename(folder)
    return folder


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_config(model: HubId, cached: Path | None, hub: Hub) -> tuple[Path, Exception | None]:
    """config.json, in the cache's folder of the model's newest commit. If the hub cannot be asked: the cached
    one, and why. Raises REQUEST_ERRORS."""
    try:
        # Fails at once where there is no connection, for which the download below would try half a minute.
        def ask() -> object:
            return hub.api.get_hf_file_metadata(url=hub.url(model, CONFIG_FILE))

        ask() if cached is not None else hub.retried(ask, is_first=True)
        return hub.file(model, CONFIG_FILE), None
    except (RevisionNotFoundError, RemoteEntryNotFoundError):
        raise
    except REQUEST_ERRORS as error:
        if cached is None:
            raise
        if not isinstance(error, OfflineModeIsEnabled):
            log.warning("the hub cannot be asked for a newer commit", model=str(model), error=cause(error))
        return cached, error


def folder_of(commit: HubId, config_file: Path, hub: Hub) -> tuple[Path, VisionConfig]:
    """The folder of a commit's tensors, and the tower's sizes. The folder's parent exists."""
    config = parse_config(read_config(config_file.parent))[1]
    tensors = sorted((tensor.name, tensor.shape) for tensor in config.published_tensors())
    selection = hashlib.sha256(json.dumps([config.prefixes, tensors]).encode()).hexdigest()[:12]
    parent = cached_assets_path(LIBRARY, commit.repo, commit.revision, assets_dir=hub.assets_dir)
    return Path(parent, selection), config


def has_weights(snapshot: Path, config: VisionConfig) -> bool:
    """Whether the cache has every shard with vision tensors, because an engine uses the same checkpoint."""
    try:
        selected = select_tensors(tensor_files(snapshot), config, snapshot)
    except CheckpointError:
        return False
    return all(file.is_file() for _, _, file in selected)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time fills the folder."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process fetches the model: waiting for it", folder=str(folder))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_tensors(commit: HubId, config: VisionConfig, snapshot: Path, target: Path, hub: Hub) -> None:
    """Writes the vision tensors to ``target``, from where an earlier call was interrupted. snapshot: the
    folder of the commit's small files. Raises CheckpointError, REQUEST_ERRORS, OSError."""
    stored, headers = remote_tensors(commit, config, snapshot, hub)
    layout = VisionFile(stored)
    target.touch()
    with target.open("r+b") as file:
        length = layout.continue_at(file)
        free = shutil.disk_usage(target.parent).free
        if free < layout.num_bytes - length:
            raise CheckpointError(
                f"the vision tensors of {commit} need {layout.num_bytes - length} more bytes, and {free} are"
                f" free at {target.parent}: free some, or set HF_HOME to a larger disk"
            )
        with shown_progress(str(commit), layout.num_bytes) as show:
            append(layout, file, hub, show)
        file.flush()
        os.fsync(file.fileno())
    try:
        layout.check_digests(target, headers)
    except CheckpointError:
        target.unlink()
        raise


def append(layout: VisionFile, file: BinaryIO, hub: Hub, show: Callable[[int], None]) -> None:
    """Completes a file that has a beginning of the layout. show: is called with the file's length."""

    def length() -> int:
        return file.seek(0, os.SEEK_END)

    def append_rest() -> None:
        for shard, start, end in layout.missing(length()):
            position = length()
            expected = position + end - start
            for piece in hub.read(shard, start, end):
                file.write(piece)
                position += len(piece)
                show(position)
            if position != expected:
                raise HTTPError(f"{shard.url} ended {expected - position} bytes early")

    hub.retried(append_rest, length)


def remote_tensors(
    commit: HubId, config: VisionConfig, snapshot: Path, hub: Hub
) -> tuple[dict[str, StoredTensor], dict[Shard, bytes]]:
    """The vision tensors by their stored names, and the bytes before the data of each shard that has some.
    Only headers are read. Raises CheckpointError, REQUEST_ERRORS."""
    headers: dict[Shard, bytes] = {}
    held: dict[Path, dict[str, StoredTensor]] = {}

    def open_shard(shard: Shard) -> None:
        headers[shard], held[Path(shard.name)] = read_header(
            shard, lambda start, end: hub.retried(lambda: b"".join(hub.read(shard, start, end)))
        )

    single = hub.shard(commit, WEIGHTS_FILE)
    if single is not None:
        open_shard(single)
        selected = select_tensors(dict.fromkeys(held[Path(WEIGHTS_FILE)], Path(WEIGHTS_FILE)), config, commit)
    else:
        selected = indexed_tensors(commit, config, snapshot, hub)
        for file in sorted({file for _, _, file in selected}):
            shard = hub.shard(commit, file.name)
            if shard is None:
                raise CheckpointError(f"{commit} lacks {file}, which {INDEX_FILE} names for vision tensors")
            open_shard(shard)
    check_held(selected, {file: tensors.keys() for file, tensors in held.items()}, commit)
    check_shapes([(tensor, name, held[file][name]) for tensor, name, file in selected], commit)
    return {name: held[file][name] for _, name, file in selected}, headers


def indexed_tensors(commit: HubId, config: VisionConfig, snapshot: Path, hub: Hub) -> list[Selected]:
    """The vision tensors that the index names, with files by name. Raises CheckpointError, REQUEST_ERRORS."""
    try:
        hub.file(commit, INDEX_FILE)
    except RemoteEntryNotFoundError:
        raise CheckpointError(f"{commit} has neither {WEIGHTS_FILE} nor {INDEX_FILE}") from None
    files = {name: Path(file.name) for name, file in tensor_files(snapshot).items()}
    return select_tensors(files, config, commit)


@contextlib.contextmanager
def shown_progress(model: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that shows how many bytes there are: as a bar on a terminal, otherwise as log lines."""
    if sys.stderr.isatty():
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress("{task.description}", *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"vision tensors of {model}", total=total)
            yield lambda length: bar.update(task, completed=length)
        return
    reported_s = time.monotonic()
    log.info("fetching vision tensors", model=model, total_bytes=total)

    def report(length: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= REPORT_EVERY_S or length == total:
            reported_s = time.monotonic()
            log.info("fetching vision tensors", model=model, num_bytes=length, total_bytes=total)

    yield report


def cache_of(hub: Hub) -> str:
    return str(hub.cache_dir or constants.HF_HUB_CACHE)


def explained(error: Exception, model: HubId, hub: Hub) -> CheckpointError:
    """A failed request as one sentence that says what to do."""
    endpoint = hub.api.endpoint
    match error:
        case GatedRepoError():
            text = (
                f"{model.repo} is gated: accept its terms at {endpoint}/{model.repo}, and set HF_TOKEN to a"
                " token of that account"
            )
        case RevisionNotFoundError():
            text = f"{endpoint} has {model.repo}, but no revision {model.revision!r} of it"
        case RepositoryNotFoundError():
            text = (
                f"there is no folder {model.repo} here and no model {model.repo} at {endpoint} that this user"
                " may see: check the name, and for a private model set HF_TOKEN"
            )
        case RemoteEntryNotFoundError():
            text = f"{model} has no {CONFIG_FILE}: needs a checkpoint in the layout of transformers"
        case OfflineModeIsEnabled():
            text = (
                f"{model} is not in {cache_of(hub)}, and HF_HUB_OFFLINE is set: run `vision-encoder download"
                f" {model}` where {endpoint} can be reached"
            )
        case HfHubHTTPError():
            is_refused = error.response.status_code in (401, 403)
            advice = "check HF_TOKEN" if is_refused else "check HF_ENDPOINT, or try again later"
            text = f"{endpoint} answers for {model.repo} with {cause(error)}: {advice}"
        case HFValidationError():
            text = f"there is no folder {model.repo} here, and a model on a hub cannot have the name: {error}"
        case _:
            text = (
                f"there is no folder {model.repo} here, {cache_of(hub)} lacks {model}, and {endpoint} cannot"
                f" be reached: {cause(error)}; check the network and HF_ENDPOINT, or give a checkpoint's"
                f" folder as --model, or fill the cache by `vision-encoder download {model}` elsewhere and"
                " set HF_HUB_OFFLINE=1"
            )
    return CheckpointError(text)
