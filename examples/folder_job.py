"""A folder of images to one .npy file each; run it again to go on where it ended.

    python examples/folder_job.py FOLDER OUT [--server 127.0.0.1:50051]

``vision-encoder encode FOLDER --out-dir OUT --resume`` does the same without a program.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np

from lm_adapter import AsyncVisionEncoderClient, ImageItem, ItemFailed


async def encode_files(server: str, paths: list[Path], out: Path) -> int:
    """Returns the number of files that failed."""
    num_failed = 0
    # At most 64 files are in memory here. The client waits while the service is overloaded.
    slots = asyncio.Semaphore(64)

    async def encode(client: AsyncVisionEncoderClient, path: Path) -> None:
        nonlocal num_failed
        target = out / f"{path.name}.npy"
        if target.exists():
            return
        async with slots:
            try:
                rows = await client.encode(ImageItem.from_path(path))
            except ItemFailed as failure:
                num_failed += 1
                print(f"{path}: {failure}", file=sys.stderr)
                return
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, rows.numpy())  # float32 [rows, D * (1 + deepstack levels)]
        partial.rename(target)

    async with AsyncVisionEncoderClient(server) as client, asyncio.TaskGroup() as group:
        for path in paths:
            group.create_task(encode(client, path))
    return num_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--server", default="127.0.0.1:50051")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = sorted(options.folder.glob("*.jp*g"))
    sys.exit(1 if asyncio.run(encode_files(options.server, paths, options.out)) else 0)
