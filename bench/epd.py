"""A vLLM server with its own tower, and one with rows from the service, under the same open-loop load on a
CPU.

    .venv-engines/bin/python bench/epd.py            # make test-engines makes the environment

Owns both servers, the load and the figures: time to first token and throughput of streamed chat requests with
one new image each, sent at random times at several rates. Encoder, front and vLLM share the machine's cores,
so this measures what the way through the service costs, and that waiting images do not delay other requests.
It does not measure the gain of a device of the encoder's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import RESULTS, ResultFile, describe_environment, percentile

from tests.engines.checkpoints import write_checkpoint
from tests.engines.pictures import data_url, picture
from tests.engines.processes import Encoder, Stack, VllmServer

FAMILY = "qwen3_vl"
DTYPE = "float32"
MAX_TOKENS = 16
SERVERS = ("tower in vLLM", "rows from the service")
ARGUMENTS = ("--max-num-batched-tokens", "512")
LABEL = (
    "random weights, one CPU machine: encoder, front and vLLM share its cores, so this shows no gain of a "
    "device of the encoder's own"
)


@dataclass(frozen=True)
class Timed:
    """One request. sent_s: since the load's start; first_ms: to the first token; None where it failed."""

    sent_s: float
    first_ms: float | None
    total_ms: float
    with_image: bool


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load")
    parser.add_argument("--image", type=int, nargs=2, default=[448, 448], help="width and height in pixels")
    parser.add_argument("--text-share", type=float, default=0.25, help="requests without an image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


@contextmanager
def serving(server: str, checkpoints: dict[str, Path], folder: Path) -> Iterator[str]:
    """The URL that requests go to."""
    folder.mkdir()
    if server == SERVERS[0]:
        vllm = VllmServer(checkpoints["whole"], DTYPE, FAMILY, None, folder, ARGUMENTS)
        try:
            vllm.wait_ready()
            yield vllm.url
        finally:
            vllm.stop()
        return
    with (
        Encoder(checkpoints["whole"], DTYPE, folder) as encoder,
        Stack(
            encoder, checkpoints["lm"], DTYPE, FAMILY, folder, timeout_s=120.0, arguments=ARGUMENTS
        ) as stack,
    ):
        yield stack.front_url


def bodies(count: int, arguments: argparse.Namespace, seed: int) -> list[tuple[bool, bytes]]:
    """Requests with different images: whether each has one, and its body."""
    choice = random.Random(seed)
    made = []
    for number in range(count):
        with_image = choice.random() >= arguments.text_share
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"Request {number}: what do you see?"}]
        if with_image:
            url = data_url(picture(choice.getrandbits(32), *arguments.image))
            parts.append({"type": "image_url", "image_url": {"url": url}})
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        made.append((with_image, json.dumps(body).encode()))
    return made


async def send(client: httpx.AsyncClient, begun: float, with_image: bool, body: bytes) -> Timed:
    sent = time.perf_counter()
    first: float | None = None
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
        async for line in response.aiter_lines():
            has_token = '"content":"' in line.replace('"content":""', "")
            if response.status_code == 200 and first is None and has_token:
                first = time.perf_counter()
    ended = time.perf_counter()
    first_ms = None if first is None else (first - sent) * 1e3
    return Timed(sent - begun, first_ms, (ended - sent) * 1e3, with_image)


async def load(url: str, rate: float, arguments: argparse.Namespace, seed: int) -> tuple[list[Timed], float]:
    """Sends requests open-loop at the times of a Poisson process. Returns answers and seconds."""
    choice = random.Random(seed)
    times, at_s = [], 0.0
    while (at_s := at_s + choice.expovariate(rate)) < arguments.seconds:
        times.append(at_s)
    requests = bodies(len(times), arguments, seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for with_image, body in bodies(3, arguments, seed + 1_000_003):
            await send(client, 0.0, with_image, body)
        begun = time.perf_counter()
        tasks = []
        for due_s, (with_image, body) in zip(times, requests, strict=True):
            await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - begun)))
            tasks.append(asyncio.create_task(send(client, begun, with_image, body)))
        answers = await asyncio.gather(*tasks)
        return answers, time.perf_counter() - begun


def record_of(server: str, rate: float, answers: Sequence[Timed], seconds: float) -> dict[str, Any]:
    """Rates, and p50 and p95 of the time to first token in ms, separately with and without an image."""
    done = [answer for answer in answers if answer.first_ms is not None]
    record: dict[str, Any] = {
        "server": server,
        "requests_per_s": rate,
        "num_requests": len(answers),
        "num_failed": len(answers) - len(done),
        "answered_per_s": len(done) / seconds,
        "tokens_per_s": len(done) * MAX_TOKENS / seconds,
    }
    for name, with_image in (("image", True), ("text", False)):
        first = [answer.first_ms for answer in done if answer.with_image is with_image and answer.first_ms]
        if first:
            record[f"{name}_first_token_ms"] = {
                "p50": statistics.median(first),
                "p95": percentile(first, 0.95),
            }
    record["answers"] = [asdict(answer) for answer in answers]
    return record


def table_of(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"vLLM {result['versions']['vllm']}, {result['settings']['size']} model on {result['device']}",
        caption=result["label"],
    )
    table.add_column("server")
    columns = ("requests/s", "answered/s", "tokens/s", "image p50 ms", "p95", "text p50 ms", "p95", "failed")
    for name in columns:
        table.add_column(name, justify="right")
    for record in result["records"]:
        image, text = record.get("image_first_token_ms"), record.get("text_first_token_ms")
        table.add_row(
            record["server"],
            f"{record['requests_per_s']:g}",
            f"{record['answered_per_s']:.2f}",
            f"{record['tokens_per_s']:.1f}",
            *([f"{image['p50']:.0f}", f"{image['p95']:.0f}"] if image else ["", ""]),
            *([f"{text['p50']:.0f}", f"{text['p95']:.0f}"] if text else ["", ""]),
            str(record["num_failed"]),
        )
    return table


def main() -> None:
    arguments = parse_arguments()
    environment = describe_environment(torch.device("cpu"), arguments.commit, ("vllm", "grpcio", "fastapi"))
    result: dict[str, Any] = {
        "bench": "epd",
        "label": LABEL,
        **environment,
        "settings": {
            **{name: value for name, value in vars(arguments).items() if name not in ("out", "commit")},
            "family": FAMILY,
            "dtype": DTYPE,
            "max_tokens": MAX_TOKENS,
            "vllm_arguments": list(ARGUMENTS),
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average_before": list(os.getloadavg()),
        },
        "complete": False,
        "records": [],
    }
    # On SIGTERM the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    file = ResultFile(arguments.out, "epd", result)
    with tempfile.TemporaryDirectory(prefix="ve-epd-") as name:
        root = Path(name)
        checkpoints = {
            "whole": write_checkpoint(root / "whole", FAMILY, size=arguments.size),
            "lm": write_checkpoint(root / "lm", FAMILY, size=arguments.size, with_tower=False),
        }
        for number, server in enumerate(SERVERS):
            with serving(server, checkpoints, root / f"server-{number}") as url:
                for step, rate in enumerate(arguments.rates):
                    answers, seconds = asyncio.run(load(url, rate, arguments, arguments.seed + step))
                    result["records"].append(record_of(server, rate, answers, seconds))
                    file.write()
    result["complete"] = True
    file.write()
    console = Console()
    console.print(table_of(result))
    console.print(f"written to {file.path}")


if __name__ == "__main__":
    main()
