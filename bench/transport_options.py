"""What a run of the transport bench can be asked for.

Owns the command line and its defaults, which differ for a quick run and on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measurement import RESULTS
from transport_cases import CONCURRENCIES, CONCURRENT_SIZES_MIB, HOST_PATHS, PATHS, SIZES_MIB

QUICK_SIZES_MIB = (0.4, 3.0, 32.0)


def parse_arguments(description: str, line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="default: all, on a CPU those without GPU")
    parser.add_argument("--sizes-mib", nargs="+", type=float, help="of one item's rows, to the page below")
    parser.add_argument("--concurrency", nargs="+", type=int, help="callers at once; 1 for every size")
    parser.add_argument(
        "--concurrent-sizes-mib", nargs="+", type=float, help="sizes that several callers ask for"
    )
    parser.add_argument("--quick", action="store_true", help="three sizes, one or eight callers, few calls")
    parser.add_argument("--budget-s", type=float, help="of calls for each record; its floor gets half")
    parser.add_argument("--max-calls", type=int, default=1000, help="of each caller for a record")
    parser.add_argument("--resident-mib", type=float, help="items of one size take turns over so much")
    parser.add_argument(
        "--default-malloc",
        action="store_true",
        help="leave the allocator as it is; without it every process has the settings of the images",
    )
    parser.add_argument("--time-limit-s", type=float, help="no record begins later; default 110, --quick 22")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args(line)
    on_gpu = arguments.device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu measures host memory and streams")
    arguments.paths = arguments.paths or list(PATHS if on_gpu else HOST_PATHS)
    quick = arguments.quick
    arguments.sizes_mib = arguments.sizes_mib or list(QUICK_SIZES_MIB if quick else SIZES_MIB)
    arguments.concurrency = sorted(
        {1, *(arguments.concurrency or (CONCURRENCIES[:2] if quick else CONCURRENCIES))}
    )
    arguments.concurrent_sizes_mib = arguments.concurrent_sizes_mib or list(
        CONCURRENT_SIZES_MIB[:1] if quick else CONCURRENT_SIZES_MIB
    )
    arguments.budget_s = arguments.budget_s or (0.25 if quick else 0.8)
    arguments.resident_mib = arguments.resident_mib or (96.0 if quick else 384.0)
    arguments.time_limit_s = arguments.time_limit_s or (22.0 if quick else 110.0)
    return arguments
