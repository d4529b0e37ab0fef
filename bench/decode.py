"""JPEG photographs to pixels in host memory: the workers' decoder against the device's, in one run.

    python bench/decode.py                          # host, nvJPEG on cuda:0 and its hardware engine
    python bench/decode.py --device cpu --quick     # the host alone, a few seconds

Owns the photographs, the threads and the table. Each variant is what a service's worker calls, from a file's
bytes to an upright array on the host, with as many threads as given, each with the next file at once: a
closed loop. Variants take turns in a new order each round. Before anything is timed the device's pixels are
compared with the host's.

For each size, variant and number of threads: ``images_per_s``; ``ms_per_image``, what one image takes its
thread; ``cpu_ms_per_image``, the processor time of the whole process, which is what decoding on the device is
to save. Medians over the rounds; a device that is not there, or a variant that cannot open, is in
``left_out`` with its reason.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "proto"))

from measurement import RESULTS, ResultFile, describe_environment
from rich.console import Console
from rich.table import Table

from encoder_service.errors import ConfigurationError
from encoder_service.ingest.cores import usable_cores
from encoder_service.ingest.decode import DecodeLimits, decode_rgb
from encoder_service.ingest.device_decode import DeviceDecoding

LIMITS = DecodeLimits(1 << 28, 1 << 27)
# Height and width by name.
SIZES = {"448": (448, 448), "1024": (1024, 1024), "12mp": (3000, 4000)}
QUICK_SIZES = {"448": (448, 448), "1024": (1024, 1024)}
VARIANTS = ("host", "cuda", "hardware")
PACKAGES = ("pillow", "simplejpeg", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg")
# Values that are at most so many levels apart count as near.
NEAR = 3


class Sample(NamedTuple):
    """num_images: in wall_s of wall clock and cpu_s of the process's processor time."""

    num_images: int
    wall_s: float
    cpu_s: float


def photograph(height: int, width: int, seed: int) -> bytes:
    """A file of quality 90 in 4:2:0: coarse colours smoothly enlarged, with grain, about two bits a pixel."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 32), max(2, width // 32), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(0, 4, (height, width, 1)).round().astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=90, subsampling=2
    )
    return file.getvalue()


def open_variants(
    device: torch.device, wanted: list[str]
) -> tuple[dict[str, DeviceDecoding | None], dict[str, str]]:
    """Those that can be had, None for the host, and the reasons of the others."""
    found: dict[str, DeviceDecoding | None] = {}
    left_out: dict[str, str] = {}
    for name in wanted:
        if name == "host":
            found[name] = None
        elif device.type != "cuda":
            left_out[name] = f"nvJPEG needs a CUDA device, this is {device}"
        else:
            try:
                from encoder_service.ingest.nvjpeg import open_nvjpeg

                decoding = open_nvjpeg(device, "cuda" if name == "cuda" else "hardware")
                decoding.max_pixels = LIMITS.max_image_pixels
                decoding.try_out()
                found[name] = decoding
            except ConfigurationError as error:
                left_out[name] = str(error)
    return found, left_out


def distances(files: list[bytes], decoding: DeviceDecoding) -> dict[str, Any]:
    """How far the pixels are from the host's, in levels, and where they were decoded."""
    before = dict(decoding.counts)
    apart = np.concatenate(
        [
            np.abs(
                decode_rgb(data, LIMITS, decoding=decoding).numpy().astype(np.int16)
                - decode_rgb(data, LIMITS).numpy()
            ).ravel()
            for data in files
        ]
    )
    return {
        "mean": float(apart.mean()),
        "near_share": float((apart <= NEAR).mean()),
        "max": int(apart.max()),
        "places": {place: number - before[place] for place, number in decoding.counts.items()},
    }


def sample(
    files: list[bytes],
    decoding: DeviceDecoding | None,
    num_threads: int,
    pool: ThreadPoolExecutor,
    run_s: float,
) -> Sample:
    """As many images as ``num_threads`` threads decode in about ``run_s``, each at least one."""
    ends_s = time.perf_counter() + run_s
    start = random.randrange(len(files))

    def work(first: int) -> int:
        for done in itertools.count(1):
            decode_rgb(files[(first + done * num_threads) % len(files)], LIMITS, decoding=decoding)
            if time.perf_counter() >= ends_s:
                return done
        raise AssertionError

    begun_s, cpu_s = time.perf_counter(), time.process_time()
    num_images = sum(pool.map(work, range(start, start + num_threads)))
    return Sample(num_images, time.perf_counter() - begun_s, time.process_time() - cpu_s)


def measure(
    name: str, files: list[bytes], variants: dict[str, DeviceDecoding | None], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One record for each variant and number of threads, of one size of image."""
    with Image.open(io.BytesIO(files[0])) as picture:
        width, height = picture.size
    compared = {
        variant: distances(files[:2], decoding)
        for variant, decoding in variants.items()
        if decoding is not None
    }
    samples: dict[tuple[str, int], list[Sample]] = {}
    for num_threads in arguments.threads:
        with ThreadPoolExecutor(num_threads) as pool:
            runs = {
                variant: partial(sample, files, decoding, num_threads, pool)
                for variant, decoding in variants.items()
            }
            for run in runs.values():
                run(arguments.sample_s)  # warm-up: threads, decoders, their memory
            for done in range(arguments.repeats):
                order = list(runs)
                random.Random(done).shuffle(order)
                for variant in order:
                    samples.setdefault((variant, num_threads), []).append(runs[variant](arguments.sample_s))
    return [
        {
            "size": name,
            "height": height,
            "width": width,
            "file_bytes": round(statistics.mean(len(data) for data in files)),
            "variant": variant,
            "num_threads": num_threads,
            "images_per_s": statistics.median(one.num_images / one.wall_s for one in taken),
            "ms_per_image": statistics.median(one.wall_s * num_threads / one.num_images for one in taken)
            * 1e3,
            "cpu_ms_per_image": statistics.median(one.cpu_s / one.num_images for one in taken) * 1e3,
            "num_images": sum(one.num_images for one in taken),
            "from_host": compared.get(variant),
        }
        for (variant, num_threads), taken in samples.items()
    ]


def show(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "size",
        "threads",
        "decoder",
        "images/s",
        "ms an image",
        "core ms an image",
        title="JPEG files to pixels",
    )
    for one in sorted(records, key=lambda record: (record["height"], record["num_threads"])):
        table.add_row(
            one["size"],
            str(one["num_threads"]),
            one["variant"],
            f"{one['images_per_s']:.0f}",
            f"{one['ms_per_image']:.2f}",
            f"{one['cpu_ms_per_image']:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--files", type=int, default=8, help="of each size, used in turn")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--sample-s", type=float, default=0.7, help="of one variant in one round")
    parser.add_argument("--quick", action="store_true", help="no large photographs, two short rounds")
    parser.add_argument("--commit", help="when this is no checkout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sizes = SIZES
    if arguments.quick:
        sizes, arguments.repeats, arguments.sample_s, arguments.files = QUICK_SIZES, 2, 0.05, 2
    torch.set_num_threads(1)
    variants, left_out = open_variants(arguments.device, arguments.variants)
    settings = {
        name: str(value) if isinstance(value, torch.device) else value
        for name, value in vars(arguments).items()
        if name not in ("out", "commit")
    }
    result = describe_environment(arguments.device, arguments.commit, packages=PACKAGES) | {
        "complete": False,
        "settings": settings,
        "num_cores": usable_cores(),
        "left_out": left_out,
        "records": [],
    }
    file = ResultFile(arguments.out, "decode", result)
    for name, (height, width) in sizes.items():
        files = [photograph(height, width, random.randrange(1 << 30)) for _ in range(arguments.files)]
        result["records"] += measure(name, files, variants, arguments)
        file.write()
    result["complete"] = True
    file.write()
    show(result["records"], Console())
    console = Console(stderr=True)
    for name, reason in left_out.items():
        console.print(f"left out {name}: {reason}")
    console.print(f"wrote {file.path.name}")


if __name__ == "__main__":
    main()
