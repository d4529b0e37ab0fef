"""What a run of the serving bench can be asked for.

Owns the command line and its defaults, which differ for a quick run and on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measurement import RESULTS
from serve_traffic import CHAT, HEAVY, MIXES

from encoder_service.ingest.cores import usable_cores
from encoder_service.towers.synthetic import FAMILIES, SIZES

LOADS = (1.1, 0.1, 0.8, 0.5)
QUICK_LOADS = (1.1, 0.3)
OTHER_LOADS = (1.1, 0.1)
# Of the mixes, those that have every load and the plain loop.
NUM_MAIN_MIXES = 2
BASELINE_LOAD = 0.6
BURSTY_LOAD = 0.6
TRANSPORTS = ("device", "host", "inline")


def parse_arguments(description: str, line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--precision", choices=("dtype", "fp8"), default="dtype")
    parser.add_argument(
        "--mixes",
        nargs="+",
        choices=MIXES,
        help="the first two with all loads and the plain loop, the others with two; one if quick",
    )
    parser.add_argument(
        "--loads", nargs="+", type=float, help="new images a second, over what the tower alone does"
    )
    parser.add_argument(
        "--bursty", type=float, help=f"load of the bursty cell, 0: none; default {BURSTY_LOAD}"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: device, on a CPU host")
    parser.add_argument("--clients", type=int, help="processes that send; default: half of the cores")
    parser.add_argument("--ingest-threads", type=int, help="default: the cores without the clients'")
    parser.add_argument("--resize", choices=("host", "device"), default="host", help="where the service does")
    parser.add_argument("--torch-threads", type=int, help="of the service; default: its own on a GPU")
    parser.add_argument("--repeat-share", type=float, default=0.3, help="of the requests, by Zipf")
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the popularity")
    parser.add_argument(
        "--bound-ms", type=float, help="latency that goodput keeps; default 300, on a CPU 1500"
    )
    parser.add_argument(
        "--grpc-loads",
        nargs="*",
        type=float,
        default=[],
        help="loads that are sent once more, by clients that ask for every item over gRPC",
    )
    parser.add_argument("--baseline-batch", type=int, default=8, help="images in its forward; 0: no baseline")
    parser.add_argument("--photos", type=int, help="files of a mix, each sent under many contents")
    parser.add_argument("--scale", type=float, help="of the photographs' sides; a quick run on a CPU: 0.25")
    parser.add_argument("--device-arena-gib", type=float, default=16.0)
    parser.add_argument("--host-arena-gib", type=float, help="default 4, on a CPU 0.5")
    parser.add_argument("--cell-s", type=float, help="seconds of one load, its first fifth a warm-up")
    parser.add_argument("--tower-s", type=float, help="seconds of the tower alone, a mix")
    parser.add_argument("--start-limit-s", type=float, default=150.0, help="for a process to be ready")
    parser.add_argument("--time-limit-s", type=float, help="no load begins later; default 215, --quick 32")
    parser.add_argument("--quick", action="store_true", help="one mix, three loads, few seconds each")
    parser.add_argument("--profile", action="store_true", help="of the event loop; slows the service down")
    parser.add_argument("--seed", type=int, help="of sizes and arrivals; default: a new one")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args(line)
    on_gpu, quick = arguments.device.type == "cuda", arguments.quick
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --quick --device cpu --size tiny shows that the bench runs")
    if not on_gpu and arguments.resize == "device":
        parser.error("resizing on the device needs a GPU")
    if not on_gpu and arguments.transport == "device":
        parser.error("rows on the device need a GPU")
    cores = usable_cores()
    small = quick and not on_gpu
    defaults = {
        "mixes": ["448-heavy"] if quick else [*HEAVY, "448", CHAT],
        "loads": list(QUICK_LOADS if quick else LOADS),
        "transport": "device" if on_gpu else "host",
        "clients": max(1, cores // 2),
        "bound_ms": 300.0 if on_gpu else 1500.0,
        "photos": 20 if quick else 100,
        "scale": 0.25 if small else 1.0,
        "host_arena_gib": 4.0 if on_gpu else 0.5,
        "cell_s": 2.5 if quick else 6.0,
        "tower_s": 1.2 if quick else 3.0,
        "time_limit_s": 32.0 if quick else 215.0,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.bursty is None:
        arguments.bursty = BURSTY_LOAD
    if arguments.ingest_threads is None:
        arguments.ingest_threads = max(1, cores - arguments.clients)
    return arguments
