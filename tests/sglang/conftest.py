"""Checkpoints, an encoder and the reference model of each family, for a real SGLang on the CPU.

Collected only where SGLang is installed: `make test-sglang` runs this folder in its own environment.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import random
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sglang.reference import Reference

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from bench.harness.engine_checkpoints import write_checkpoint
    from bench.harness.sglang import Encoder
    from tests.engines.pictures import picture

FAMILIES = ("qwen3_vl", "qwen3_5")
# Content that an encoder of these tests holds at once.
MAX_QUEUED_BYTES = 16 << 20
# For tests of what does not depend on the model. Qwen3.5 runs in `make test-sglang-all` alone.
both_families = pytest.mark.parametrize(
    "family",
    ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.extended)],
    indirect=True,
    scope="session",
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per family a whole model."""
    root = tmp_path_factory.mktemp("sglang")
    return {family: write_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Tests are ordered by it, so that one server of each serves all of them."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def checkpoint(family: str, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[family]


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    # Not in the process that only starts the workers: sentencepiece, which transformers imports, ends it with
    # a segmentation fault after the tests.
    from tests.sglang.reference import Reference

    return Reference(checkpoint)


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """The same pictures in every run, others in each test: whether tokens are equal or differ does not depend
    on luck."""
    random.seed(request.node.nodeid)


@dataclass(frozen=True)
class Files:
    """Files of a folder, by HTTP."""

    folder: Path
    url: str

    def add(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return f"{self.url}/{name}"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """The encoders fetch from here."""
    folder = tmp_path_factory.mktemp("files")
    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Files(folder, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


@contextmanager
def running_encoder(
    checkpoint: Path,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    registers_at: str | None = None,
) -> Iterator[Encoder]:
    """registers_at: the URL of SGLang's bootstrap server."""
    # A socket's name has a short limit, which pytest's folders exceed.
    with (
        tempfile.TemporaryDirectory(prefix="ve-sgl-") as sockets,
        Encoder(
            checkpoint,
            folder,
            Path(sockets) / "broker.sock",
            variables=variables,
            registers_at=registers_at,
        ) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def variables(files: Files) -> dict[str, str]:
    """Settings of both encoders."""
    return {
        "VE_URL_ALLOW": files.url,
        "VE_URL_NETWORKS": "127.0.0.1/32",
        "VE_MAX_MESSAGE_BYTES": str(MAX_QUEUED_BYTES),
        "VE_MAX_QUEUED_BYTES": str(MAX_QUEUED_BYTES),
    }


@pytest.fixture(scope="session")
def encoder(
    checkpoint: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encoder]:
    """The service in float32, with gRPC, a broker and SGLang's protocol."""
    with running_encoder(checkpoint, tmp_path_factory.mktemp("encoder"), variables) as running:
        yield running


@pytest.fixture(scope="session")
def other_encoder(
    checkpoint: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encoder]:
    """A second one of the same checkpoint."""
    with running_encoder(checkpoint, tmp_path_factory.mktemp("other"), variables) as running:
        yield running


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Three of different sizes."""
    return [picture(seed, *size) for seed, size in enumerate(((200, 260), (330, 180), (224, 160)))]
