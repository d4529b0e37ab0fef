"""What a run of the tower bench can be asked for.

Owns the command line and its defaults, which differ for a quick run and on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from cases import CASES, KNOWN_CASES, QUICK_CASES, SMALL_CASE
from measurement import RESULTS
from variants import EVERYWHERE, VARIANTS

from encoder_service.towers.synthetic import FAMILIES, SIZES


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--cases", nargs="+", choices=KNOWN_CASES, help="default: all, with --quick two, on a CPU one"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*VARIANTS, EVERYWHERE),
        help=f"default: all but {EVERYWHERE}, with --quick not compiled",
    )
    parser.add_argument("--quick", action="store_true", help="two cases, ten runs each, nothing compiled")
    parser.add_argument("--every-backend", action="store_true", help="each attention backend in a graph too")
    parser.add_argument("--profile", action="store_true", help="kernels of each case's replay, in a file too")
    parser.add_argument(
        "--ladder",
        choices=("first", "all", "cases"),
        help="for which families every bucket of the default ladder is captured, instead of the cases' own;"
        " default: first, with --quick cases",
    )
    parser.add_argument("--variant-budget-s", type=float, default=0.7, help="timing of a case, a variant")
    parser.add_argument("--compile-budget-s", type=float, default=120.0, help="of the whole run")
    parser.add_argument("--power-s", type=float, default=1.0, help="each variant alone, saturated; 0: none")
    parser.add_argument("--time-limit-s", type=float, help="no case begins later; default 440, --quick 100")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny --quick shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    elif arguments.profile:
        parser.error("--profile reads the kernels of a CUDA device")
    default_dtype = "float32" if arguments.device.type == "cpu" else "bfloat16"
    arguments.dtype = getattr(torch, arguments.dtype or default_dtype)
    quick = arguments.quick
    is_small = quick and arguments.device.type == "cpu"
    arguments.cases = arguments.cases or list([SMALL_CASE] if is_small else QUICK_CASES if quick else CASES)
    arguments.variants = arguments.variants or [
        variant for variant in VARIANTS if not (quick and variant == "ref_compiled")
    ]
    arguments.ladder = arguments.ladder or ("cases" if quick else "first")
    arguments.time_limit_s = arguments.time_limit_s or (100.0 if quick else 440.0)
    arguments.warm_up, arguments.repeats = (1, 10) if quick else (3, 50)
    if is_small:
        arguments.repeats = 3
    return arguments
