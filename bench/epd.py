"""Compares servers of one engine: with its own vision tower, with rows from an encoder, and its own split.

    .venv-engines/bin/python -m bench.epd                     # a CPU: what the way through the service costs
    .venv-sglang/bin/python -m bench.epd --engine sglang
    python -m bench.epd --device cuda --size full --rounds 5  # a GPU that all servers share
    python -m bench.epd --device cuda --size full --rounds 5 --encoder-device cuda:1
    python -m bench.epd --device cuda --size full --rates     # which rate stays within bounds: epd_rates

Owns the loads and the figures: time to first token, requests a second, and time between tokens of streamed
chat requests. ``epd_servers`` owns the servers, which stay up. In each round every case is sent to all
servers, one after the other, with the same requests. New pictures and clips are copies of a few files with
another comment, so they cost as much as any new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from rich.console import Console
from rich.table import Table

from bench import epd_rates
from bench.epd_rates import MIXES, Mix
from bench.epd_requests import Pictures, Timed, body, send
from bench.epd_servers import SERVERS, engine_arguments, serving
from bench.harness.engine_checkpoints import write_checkpoint
from bench.measurement import RESULTS, ResultFile, describe_environment, percentile

TEXT_TOKENS = 32
PIXELS_OF_A_TOKEN = 32 * 32
LM_LAYERS, LM_INTERMEDIATE = 36, 12288
"""Layers and intermediate size of a language model with about 8B parameters."""


@dataclass(frozen=True)
class Case:
    """One load. callers: concurrent requests; 0 if ``rate`` is set, which is the mean number of requests a
    second at random times. seen: the share of pictures that were sent before. text_callers: additional
    concurrent requests with text only; then the time between tokens is measured on these. clip_s: each file
    is a clip of so many seconds; 0 for images. words: further tokens of text in each request; with no image,
    the case shows what the language model does with as many tokens."""

    px: int
    images: int
    tokens: int
    callers: int
    count: int
    seen: float = 0.0
    rate: float = 0.0
    text_callers: int = 0
    clip_s: int = 0
    words: int = 0

    @property
    def name(self) -> str:
        load = f"{self.rate:g}/s" if self.rate else f"{self.callers} callers"
        media = f"clip of {self.clip_s} s, {self.px}" if self.clip_s else f"{self.images}x{self.px}"
        if not self.images:
            media = f"text of {self.words} tokens"
        parts = [media, f"{self.tokens} tokens", load]
        if self.seen:
            parts.append("all seen" if self.seen == 1 else f"{self.seen:.0%} seen")
        if self.text_callers:
            parts.append(f"beside {self.text_callers} of text")
        return ", ".join(parts)


CASES = {
    "tiny": (
        Case(224, 1, 4, 1, 6),
        Case(224, 1, 4, 4, 12, seen=1.0),
        Case(224, 1, 4, 2, 6, text_callers=1),
        Case(224, 1, 4, 0, 8, rate=2.0),
        Case(224, 1, 4, 1, 2, clip_s=2),
    ),
    "small": (
        Case(448, 1, 16, 1, 12),
        Case(448, 1, 16, 0, 24, rate=1.0),
        Case(448, 1, 16, 4, 16, seen=1.0),
    ),
    "full": (
        Case(448, 1, 1, 1, 32),
        Case(1024, 1, 1, 1, 24),
        Case(448, 1, 1, 32, 384),
        Case(448, 4, 1, 16, 128),
        Case(1024, 1, 1, 32, 128),
        Case(1024, 4, 1, 8, 32),
        Case(1024, 1, 1, 16, 128, seen=0.7),
        Case(448, 1, 64, 32, 192),
        Case(448, 1, 1, 32, 384, seen=1.0),
        Case(1024, 1, 1, 16, 128, seen=1.0),
        Case(448, 1, 1, 0, 256, rate=40.0),
        Case(448, 1, 1, 8, 512, text_callers=16),
        Case(448, 1, 1, 4, 24, clip_s=8),
        Case(448, 1, 1, 8, 512, seen=1.0, text_callers=16),
        Case(448, 0, 1, 1, 32, words=448 * 448 // PIXELS_OF_A_TOKEN),
        Case(1024, 0, 1, 1, 24, words=1024 * 1024 // PIXELS_OF_A_TOKEN),
        Case(448, 0, 1, 32, 384, words=448 * 448 // PIXELS_OF_A_TOKEN),
        Case(1024, 0, 1, 16, 128, words=1024 * 1024 // PIXELS_OF_A_TOKEN),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=tuple(SERVERS), default="vllm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(CASES), default="small")
    parser.add_argument(
        "--encoder-device", help="of this service's encoder, such as cuda:1; the servers' by default"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="+", help="by number, from 0; all by default")
    parser.add_argument(
        "--rates",
        nargs="*",
        metavar="MIX[=RATE,...]",
        help="goodput instead of cases: mixes, with other rates in requests a second; all by default",
    )
    parser.add_argument("--seconds", type=float, default=16.0, help="of each rate")
    parser.add_argument(
        "--running", nargs=2, action="append", default=[], metavar=("SERVER", "URL"), help="is not started"
    )
    parser.add_argument("--engine-arguments", default="", help="further arguments of every server")
    parser.add_argument("--lm-layers", type=int, default=LM_LAYERS, help="of size full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.encoder_device = arguments.encoder_device or arguments.device
    if arguments.rates is not None:
        arguments.rates = chosen_mixes(parser, arguments.rates, MIXES[arguments.size])
    return arguments


def chosen_mixes(
    parser: argparse.ArgumentParser, texts: Sequence[str], known: Mapping[str, Mix]
) -> dict[str, Mix]:
    """By name. Ends the run for an unknown mix, and for what is no rate."""
    chosen = {}
    for text in texts or known:
        name, _, rates = text.partition("=")
        if name not in known:
            parser.error(f"--rates: there is no mix {name!r}, there are {', '.join(map(repr, known))}")
        try:
            found = tuple(float(rate) for rate in rates.split(",")) if rates else known[name].rates
        except ValueError:
            found = ()
        if rates and known[name].users:
            parser.error(f"--rates: {name} has users and no rates")
        if not known[name].users and not (found and all(0 < rate < math.inf for rate in found)):
            parser.error(f"--rates: {rates!r} is no list of rates such as 10,16.5")
        chosen[name] = replace(known[name], rates=found)
    return chosen


def label(arguments: argparse.Namespace) -> str:
    """Of a result: which processes share a device."""
    shared = "all servers share one device"
    if arguments.encoder_device != arguments.device:
        shared = f"the engine's servers share {arguments.device}, the encoder has {arguments.encoder_device}"
    return f"Qwen3-VL with random weights; {shared}"


def make_checkpoint(arguments: argparse.Namespace, folder: Path) -> Path:
    """Qwen3-VL with random weights. With size ``full``, the language model has about 8B parameters if
    ``lm_layers`` is not changed, and the engine generates its weights."""
    checkpoint = write_checkpoint(folder, "qwen3_vl", size=arguments.size)
    if arguments.size == "full":
        path = checkpoint / "config.json"
        config = json.loads(path.read_text())
        text = config["text_config"]
        text |= {"num_hidden_layers": arguments.lm_layers, "intermediate_size": LM_INTERMEDIATE}
        if "layer_types" in text:
            text["layer_types"] = (text["layer_types"] * LM_LAYERS)[: arguments.lm_layers]
        path.write_text(json.dumps(config))
    return checkpoint


# Loads ----------------------------------------------------------------------------------------------------


async def load(url: str, case: Case, requests: Sequence[bytes], seed: int) -> dict[str, Any]:
    """Sends the requests. Returns the figures for one case, server and round."""
    choice = random.Random(seed)
    timed: list[Timed] = []
    beside: list[Timed] = []
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as client:

        async def call(queue: list[bytes]) -> None:
            while queue:
                timed.append(await send(client, url, queue.pop()))

        async def talk() -> None:
            while True:
                beside.append(await send(client, url, body(choice.getrandbits(32), (), TEXT_TOKENS)))

        texts = [asyncio.create_task(talk()) for _ in range(case.text_callers)]
        begun = time.perf_counter()
        queue = list(requests)
        if case.rate:
            tasks = []
            for request in queue:
                tasks.append(asyncio.create_task(send(client, url, request)))
                await asyncio.sleep(choice.expovariate(case.rate))
            timed = list(await asyncio.gather(*tasks))
        else:
            await asyncio.gather(*(call(queue) for _ in range(case.callers)))
        seconds = time.perf_counter() - begun
        for task in texts:
            task.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
    good = [one for one in timed if not one.failure]
    first = sorted(one.first_ms for one in good)
    gaps = [gap for one in (beside or good) for gap in one.gaps_ms]
    return {
        "requests_per_s": len(good) / seconds,
        "first_token_ms": {"p50": statistics.median(first), "p95": percentile(first, 0.95)}
        if first
        else None,
        "between_tokens_ms": {"p50": statistics.median(gaps), "p99": percentile(gaps, 0.99)}
        if gaps
        else None,
        "num_failed": len(timed) - len(good),
        "failures": sorted({one.failure for one in timed if one.failure})[:3],
    }


def requests_of(case: Case, pictures: Pictures, start: int) -> list[bytes]:
    """The requests of one round. If the case needs seen pictures, a warm-up has sent them before."""
    return [
        body(start + number, [pictures.take(case.seen) for _ in range(case.images)], case.tokens, case.words)
        for number in range(case.count)
    ]


def run_case(
    urls: dict[str, str], case: Case, arguments: argparse.Namespace, number: int
) -> list[dict[str, Any]]:
    """All rounds of a case. The order of the servers is reversed in every second round."""
    choice = random.Random(f"{arguments.seed} {number}")
    pictures = Pictures((case.px, case.px), choice, case.clip_s)
    warm = replace(case, count=max(8, 2 * case.callers), callers=max(4, case.callers), seen=0.0, rate=0.0)
    warm = replace(warm, text_callers=0)
    first = requests_of(warm, pictures, 0)
    for url in urls.values():
        asyncio.run(load(url, warm, first, arguments.seed))
    records = []
    for turn in range(arguments.rounds):
        requests = requests_of(case, pictures, (turn + 1) * 100_000)
        order = list(urls) if turn % 2 == 0 else list(urls)[::-1]
        for server in order:
            seed = arguments.seed + turn
            figures = asyncio.run(load(urls[server], case, requests, seed))
            records.append({"case": case.name, **asdict(case), "server": server, "round": turn, **figures})
    return records


def records_of(urls: dict[str, str], arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Of one case, or one mix, after the other. Clips are compared with vLLM alone."""
    for name, mix in (arguments.rates or {}).items():
        if not mix.clip_s or arguments.engine == "vllm":
            yield epd_rates.run_mix(
                {server: [url] for server, url in urls.items()},
                name,
                mix,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
                seed=arguments.seed,
            )
    if arguments.rates is not None:
        return
    for number, case in enumerate(CASES[arguments.size]):
        if case.clip_s and arguments.engine == "sglang":
            continue
        if arguments.cases is None or number in arguments.cases:
            yield run_case(urls, case, arguments, number)


# Results --------------------------------------------------------------------------------------------------


def figure(record: dict[str, Any], name: str, part: str = "") -> float | None:
    value = record[name]
    return value[part] if part and value else value


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case and server, the median over the rounds with the minimum and the maximum."""
    rows = []
    for case in dict.fromkeys(record["case"] for record in records):
        for server in dict.fromkeys(record["server"] for record in records):
            mine = [record for record in records if (record["case"], record["server"]) == (case, server)]
            row: dict[str, Any] = {"case": case, "server": server}
            row["num_failed"] = sum(record["num_failed"] for record in mine)
            for name, part in (
                ("requests_per_s", ""),
                ("first_token_ms", "p50"),
                ("first_token_ms", "p95"),
                ("between_tokens_ms", "p99"),
            ):
                values = [one for one in (figure(record, name, part) for record in mine) if one is not None]
                if values:
                    row[f"{name} {part}".strip()] = [statistics.median(values), min(values), max(values)]
            rows.append(row)
    return rows


def table_of(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['settings']['engine']} on {result['device']}, {result['settings']['size']}")
    columns = ("requests/s", "first token p50 ms", "p95", "between tokens p99 ms", "failed")
    for name in ("case", "server", *columns):
        table.add_column(name)
    names = ("requests_per_s", "first_token_ms p50", "first_token_ms p95", "between_tokens_ms p99")
    for row in summary(result["records"]):
        cells = ["{:.1f} ({:.1f}-{:.1f})".format(*row[name]) if name in row else "" for name in names]
        table.add_row(row["case"], row["server"], *cells, str(row["num_failed"]))
    return table


def table_of_rates(result: dict[str, Any]) -> Table:
    """Points, then goodput."""
    table = Table(title=f"{result['settings']['engine']} on {result['device']}, {result['settings']['size']}")
    bounds = [epd_rates.label(bound) for bound in epd_rates.BOUNDS]
    for name in ("mix", "rate", "server", "first token p50 ms", "p99", "between tokens p50 ms", "p99"):
        table.add_column(name)
    for name in (*bounds, "failed"):
        table.add_column(name)
    times = [f"{name} {part}" for name in ("first_token_ms", "between_tokens_ms") for part in ("p50", "p99")]
    for row in epd_rates.summary(result["records"]):
        if "goodput" in row:
            shares = [f"{row['goodput'][name]}/s" for name in bounds]
            table.add_row(row["mix"], f"{epd_rates.GOOD_SHARE:.0%} at", row["server"], *[""] * 4, *shares)
            continue
        cells = ["{:.1f} ({:.1f}-{:.1f})".format(*row[name]) if row[name] else "" for name in times]
        shares = ["{:.0%} ({:.0%}-{:.0%})".format(*row["within"][name]) for name in bounds]
        rate = f"{row['rate']:g}"
        table.add_row(row["mix"], rate, row["server"], *cells, *shares, str(row["num_failed"]))
    return table


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    environment = describe_environment(device, arguments.commit, (arguments.engine, "grpcio"))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "commit")}
    if arguments.rates is not None:
        settings["rates"] = {name: asdict(mix) for name, mix in arguments.rates.items()}
    result: dict[str, Any] = {
        "bench": "epd",
        "label": label(arguments),
        **environment,
        "settings": {
            **settings,
            "all_arguments": engine_arguments(arguments),
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average_before": list(os.getloadavg()),
        },
        "complete": False,
        "records": [],
    }
    # SIGTERM must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    file = ResultFile(arguments.out, "epd", result)
    root = Path(tempfile.mkdtemp(prefix="ve-epd-"))
    try:
        checkpoint = make_checkpoint(arguments, root / "checkpoint")
        with serving(arguments, checkpoint, root) as servers:
            result["encoder_start_s"] = servers.encoder_start_s
            for records in records_of(servers.urls, arguments):
                result["records"] += records
                result["rows_come_by"] = servers.rows_come_by()
                file.write()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result["complete"] = True
    has_rates = arguments.rates is not None
    result["summary"] = (epd_rates.summary if has_rates else summary)(result["records"])
    file.write()
    console = Console(width=220 if has_rates else 160, markup=False, emoji=False)
    console.print((table_of_rates if has_rates else table_of)(result))
    console.print(f"written to {file.path}")


if __name__ == "__main__":
    main()
