"""What the shared tier costs: times of looks and writes by size, and what compressing rows would give.

    python bench/shared_tier.py      # needs valkey-server or redis-server; zstandard and lz4 where installed

Owns both measurements, on one host: the server is on a unix socket and takes one of its processor cores, so
that the times are those of this code and of copying, with no network. Rows that are compressed are a
random-weight tower's, in bfloat16, of the photographs of the tests: what has no pattern in random weights
has little more in trained ones, since all but a byte's worth of each number is mantissa and sign.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import RESULTS, describe_environment

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.store.embedding_store import EmbeddingStore, Held
from encoder_service.store.shared_tier import ServerTier, SharedTierLimits
from encoder_service.store.shared_tier_entry import Seal, rows_view
from encoder_service.store.shared_tier_server import ValkeyServer
from encoder_service.towers.registry import load_tower
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import EncodedItem, Grid, PreprocessOptions
from tests.valkey_server import ValkeyProcess

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 16_384
SIZES_MIB = (0.25, 1, 4, 16, 32, 64)
MIB = 1 << 20


class Rows:
    """Rows of Qwen3-VL 8B: 4096 elements and three deepstack levels."""

    width, dtype, num_deepstack_levels = WIDTH, torch.bfloat16, 3

    def num_rows(self, grid: Grid) -> int:
        return grid.num_patches // 4


async def times_by_size(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of writes, hits and misses; p99_gap_ms: by how
    much the event loop comes late to what else it has to do."""
    records = []
    with tempfile.TemporaryDirectory(prefix="ve-bench-") as folder, ThreadPoolExecutor(2) as workers:
        process = ValkeyProcess(Path(folder))
        client = ValkeyServer(SecretStr(process.url), prefix="bench", max_connections=4)
        limits = SharedTierLimits(timeout_s=30.0)
        tier = ServerTier(client, Seal(secrets.token_bytes(32)), Rows(), EmbeddingStore(0), workers, limits)
        try:
            for mib in SIZES_MIB:
                num_rows = int(mib * MIB) // (2 * WIDTH)
                rows = torch.randn(num_rows, WIDTH).bfloat16()
                grid = Grid(1, 2, 2 * num_rows)
                item = EncodedItem(secrets.token_bytes(32), bytes(32), grid, rows, 3)
                writes, hits, misses, gaps = [], [], [], []

                async def tick(gaps: list[float] = gaps) -> None:
                    while True:
                        started_s = time.perf_counter()
                        await asyncio.sleep(0.0005)
                        gaps.append(time.perf_counter() - started_s - 0.0005)

                ticking = asyncio.ensure_future(tick())
                for _ in range(repeats):
                    started_s = time.perf_counter()
                    tier.put("", Held(item))
                    assert tier._writer is not None
                    await asyncio.wait([tier._writer])
                    writes.append(time.perf_counter() - started_s)
                    started_s = time.perf_counter()
                    found = await tier.get("", item.key)
                    hits.append(time.perf_counter() - started_s)
                    assert found is not None
                    started_s = time.perf_counter()
                    await tier.get("", secrets.token_bytes(32))
                    misses.append(time.perf_counter() - started_s)
                ticking.cancel()
                records.append(
                    {
                        "mib": mib,
                        "write_ms": 1e3 * statistics.median(writes),
                        "hit_ms": 1e3 * statistics.median(hits),
                        "miss_ms": 1e3 * statistics.median(misses),
                        "p99_gap_ms": 1e3 * sorted(gaps)[-max(1, len(gaps) // 100)],
                    }
                )
        finally:
            await tier.stop()
            process.kill()
    return records


def photo_rows() -> bytes:
    """bfloat16 rows of a random-weight tower for the tests' photographs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        make_checkpoint(path, "qwen3_vl", "small", 1)
        loaded = load_tower(path, device=torch.device("cpu"), dtype=torch.bfloat16)
        preprocessor = load_preprocessor(path, loaded.family, DecodeLimits(64 * MIB, 64_000_000))
    found = []
    for photo in sorted((ROOT / "tests" / "data" / "photos").glob("*.[jp][pn]g")):
        frames, _, _ = preprocessor.load_image(photo.read_bytes(), PreprocessOptions())
        pixels = preprocessor.patchify(frames.frames_THWC).to(torch.bfloat16)
        with torch.inference_mode():
            found.append(
                bytes(rows_view(loaded.tower(loaded.tower.prepare([frames.grid]).with_pixels(pixels))))
            )
    return b"".join(found)


def codecs() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """Those that are installed."""
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {}
    try:
        zstandard: Any = importlib.import_module("zstandard")
        for level in (1, 3):
            found[f"zstd {level}"] = (
                zstandard.ZstdCompressor(level=level).compress,
                zstandard.ZstdDecompressor().decompress,
            )
    except ImportError:
        pass
    try:
        lz4: Any = importlib.import_module("lz4.frame")
        found["lz4"] = (lz4.compress, lz4.decompress)
    except ImportError:
        pass
    return found


def compression(rows: bytes) -> list[dict[str, Any]]:
    """Ratio and one core's speed, of rows as they lie and of their high and low bytes apart."""
    apart = torch.frombuffer(bytearray(rows), dtype=torch.uint8).reshape(-1, 2).t().contiguous()
    records = []
    for order, data in (("as they lie", rows), ("bytes apart", bytes(rows_view(apart)))):
        for name, (compress, decompress) in codecs().items():
            started_s = time.perf_counter()
            small = compress(data)
            middle_s = time.perf_counter()
            assert decompress(small) == data
            ended_s = time.perf_counter()
            records.append(
                {
                    "codec": name,
                    "order": order,
                    "ratio": len(data) / len(small),
                    "compress_mib_s": len(data) / MIB / (middle_s - started_s),
                    "decompress_mib_s": len(data) / MIB / (ended_s - middle_s),
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="result file; default: bench/results")
    arguments = parser.parse_args()
    rows = photo_rows()
    times = asyncio.run(times_by_size(arguments.repeats))
    ratios = compression(rows)
    console = Console(width=140)
    for title, records in (("one host, no network", times), (f"{len(rows) / MIB:.1f} MiB of rows", ratios)):
        table = Table(title=title)
        for column in records[0] if records else ():
            table.add_column(column)
        for one in records:
            table.add_row(
                *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in one.values())
            )
        console.print(table)
    result = {
        **describe_environment(torch.device("cpu"), None),
        "settings": {"repeats": arguments.repeats},
        "rows_bytes": len(rows),
        "times": times,
        "compression": ratios,
    }
    stem = f"shared-tier-{datetime.datetime.now(datetime.UTC).date()}"
    path = arguments.out or RESULTS / f"{stem}.json"
    if path.exists():
        path = path.with_stem(f"{path.stem}-{secrets.token_hex(2)}")
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
