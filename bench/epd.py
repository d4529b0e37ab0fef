"""Compares peers on the same GPUs: an engine with its own tower, its own split, and rows from an encoder.

    .venv-engines/bin/python -m bench.epd                     # a CPU: what the way through the service costs
    .venv-sglang/bin/python -m bench.epd --engine sglang
    .venv-lmdeploy/bin/python -m bench.epd --engine lmdeploy
    python -m bench.epd --device cuda --size full --rates     # one GPU, its default peers, no closed loops
    python -m bench.epd --device cuda --size full --gpus 2 --mixes chat documents=2,5 --peers graphs apart

Owns the run: its peers and mixes, rounds and results. ``epd_servers`` owns the peers, ``epd_rates`` the
mixes, ``epd_figures`` the figures. In each round every mix is sent to all peers of a group, one after the
other, with requests of the same kinds at the same times, but new files: peers may share an encoder. New
pictures and clips are copies of a few files with another comment, so they cost as much as any new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.charts import draw_beside
from bench.checkpoints import write_language_model
from bench.epd_figures import summary, tables
from bench.epd_rates import MIXES, WARM_UP_S, Mix, Requests, Sent, measure
from bench.epd_servers import (
    ARENA_GIB,
    WHOLE_GPU,
    Peer,
    Running,
    default_groups,
    engine_arguments,
    kv_gib,
    peers_of,
    started,
)
from bench.harness.engine_checkpoints import write_checkpoint
from bench.measurement import RESULTS, ResultFile, describe_environment
from encoder_service.checkpoints.synthetic import make_checkpoint as make_random_checkpoint

LM_LAYERS, LM_INTERMEDIATE = 36, 12288
"""Layers and intermediate size of a language model with about 8B parameters."""
LEAST_KV_GIB = 5
"""36,000 tokens of that model: 32 requests with an image of 1024 pixels each at the same time."""
WARM_UP_TURNS = 2
NO_SETTINGS = ("out", "commit", "peers", "mixes")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang", "lmdeploy"), default="vllm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(MIXES), default="small")
    parser.add_argument("--gpus", type=int, default=1, help="that each peer has")
    parser.add_argument(
        "--peers",
        nargs="+",
        action="append",
        metavar="PEER",
        help="that are up at the same time; repeated for the next ones. mps=40: 40 %% of the GPU's threads",
    )
    parser.add_argument(
        "--mixes",
        nargs="+",
        metavar="MIX[=NUMBER,...]",
        help="with other rates in requests a second, or another number of users; all by default",
    )
    parser.add_argument("--rates", action="store_true", help="of all mixes without the closed loops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each rate")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="no point begins later")
    parser.add_argument(
        "--kv-gib", type=float, help="of each vLLM or LMDeploy; by default what the fullest GPU has left"
    )
    parser.add_argument(
        "--arena-gib", type=int, default=ARENA_GIB, help="of rows that each encoder keeps on a GPU"
    )
    parser.add_argument(
        "--running", nargs=2, action="append", default=[], metavar=("PEER", "URL"), help="is not started"
    )
    parser.add_argument("--engine-arguments", default="", help="further arguments of every server")
    parser.add_argument("--lm-layers", type=int, default=LM_LAYERS, help="of size full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.gpus:
        parser.error(f"--gpus {arguments.gpus}: torch finds {torch.cuda.device_count()} GPUs")
    groups = arguments.peers or default_groups(arguments.engine, arguments.device, arguments.gpus)
    known = peers_of(arguments.engine, arguments.gpus)
    arguments.peers = [{name: chosen_peer(parser, name, known) for name in group} for group in groups]
    if arguments.engine != "sglang" and arguments.device == "cuda" and arguments.kv_gib is None:
        # Of all groups the same, so that their figures can be compared.
        arguments.kv_gib = min(kv_gib(group.values(), arguments.arena_gib) for group in arguments.peers)
        if arguments.size == "full" and arguments.kv_gib < LEAST_KV_GIB:
            parser.error(
                f"--peers: these leave each server {arguments.kv_gib:g} GiB of KV cache, and the figures need"
                f" {LEAST_KV_GIB} GiB; name fewer peers in one --peers, or set --kv-gib"
            )
    known_mixes = MIXES[arguments.size]
    if arguments.rates:
        known_mixes = {name: mix for name, mix in known_mixes.items() if not mix.is_closed_loop}
    arguments.mixes = chosen_mixes(parser, arguments.mixes, known_mixes)
    return arguments


def chosen_peer(parser: argparse.ArgumentParser, text: str, known: Mapping[str, Peer]) -> Peer:
    """By name. Ends the run for an unknown one."""
    name, _, percentage = text.partition("=")
    if name not in known:
        parser.error(f"--peers: there is no peer {name!r} here, there are {', '.join(map(repr, known))}")
    if not percentage:
        return known[name]
    if name != "mps" or not percentage.isdigit() or not 0 < int(percentage) <= WHOLE_GPU:
        parser.error(f"--peers: {text!r} is no peer with a percentage such as mps=40")
    servers = (
        replace(server, encoder=replace(server.encoder, mps=int(percentage)))  # type: ignore[type-var]
        for server in known[name].servers
    )
    return replace(known[name], servers=tuple(servers))


def chosen_mixes(
    parser: argparse.ArgumentParser, texts: Sequence[str], known: Mapping[str, Mix]
) -> dict[str, Mix]:
    """By name. Ends the run for an unknown mix, and for what is no rate or number of users."""
    chosen = {}
    for text in texts or known:
        name, _, numbers = text.partition("=")
        if name not in known:
            parser.error(f"--mixes: there is no mix {name!r}, there are {', '.join(map(repr, known))}")
        mix = chosen[name] = known[name]
        if mix.users and numbers:
            if not numbers.isdigit() or not int(numbers):
                parser.error(f"--mixes: {name} has users, and {numbers!r} is no number of them")
            chosen[name] = replace(mix, users=int(numbers))
        elif numbers:
            try:
                rates = tuple(float(rate) for rate in numbers.split(","))
            except ValueError:
                rates = (math.nan,)
            if not all(0 < rate < math.inf for rate in rates):
                parser.error(f"--mixes: {numbers!r} is no list of rates such as 10,16.5")
            chosen[name] = replace(mix, rates=rates)
    return chosen


def make_checkpoint(arguments: argparse.Namespace, folder: Path) -> Path:
    """Qwen3-VL with random weights. With size ``full``, the language model has about 8B parameters if
    ``lm_layers`` is not changed, and the engine generates its weights; LMDeploy cannot, so it gets files."""
    if arguments.size != "full":
        return write_checkpoint(folder, "qwen3_vl", size=arguments.size)
    makes_weights = arguments.engine != "lmdeploy"
    make_random_checkpoint(folder, "qwen3_vl", arguments.size, seed=3, with_lm=makes_weights)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": arguments.lm_layers, "intermediate_size": LM_INTERMEDIATE}
    if "layer_types" in text:
        text["layer_types"] = (text["layer_types"] * LM_LAYERS)[: arguments.lm_layers]
    path.write_text(json.dumps(config))
    if not makes_weights:
        write_language_model(folder, torch.device(arguments.device))
    return folder


# Loads ----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Sends the mixes to the peers of a group. left_out: by peer, or peer and part, with the reason."""

    arguments: argparse.Namespace
    running: dict[str, Running]
    ends_s: float
    left_out: dict[str, str]

    def records(self) -> Iterator[dict[str, Any]]:
        """Of one point after the other: a round of a mix at a rate with a peer. The order of the peers is
        reversed in every second round."""
        mixes = self.arguments.mixes
        requests = {name: Requests(mix, f"{self.arguments.seed} {name}") for name, mix in mixes.items()}
        for name in mixes:
            self._warm_up(name)
        for turn in range(self.arguments.rounds):
            for name, mix in mixes.items():
                for rate in mix.rates:
                    part = f"round {turn + 1}, {name} at {rate:g}"
                    for peer in list(self.running)[:: -1 if turn % 2 else 1]:
                        if self._has(peer, name, part):
                            sent = requests[name].arrivals(rate, self.arguments.seconds, part, peer)
                            about = {"mix": name, "rate": rate, "peer": peer, "round": turn}
                            yield about | self._point(peer, name, rate, part, sent)

    def _has(self, peer: str, name: str, part: str) -> bool:
        """Whether the peer gets the mix, and now."""
        mix = self.arguments.mixes[name]
        if mix.as_text and peer != next(iter(self.running)):
            return False
        if mix.clip_s and self.arguments.engine != "vllm":
            self.left_out[f"{peer}, {name}"] = "clips are compared with vLLM alone"
            return False
        if self.running[peer].others and (mix.users or mix.clip_s or mix.as_text):
            self.left_out[f"{peer}, {name}"] = "further servers send only images, and at a rate"
            return False
        if time.monotonic() > self.ends_s:
            self.left_out[f"{peer}, {part}"] = too_late(self.arguments)
            return False
        return True

    def _warm_up(self, name: str) -> None:
        """All peers at once. One that serves nothing of it is left out."""
        mix = self.arguments.mixes[name]
        few = replace(mix, turns=min(mix.turns, WARM_UP_TURNS))
        sent = Requests(few, f"{self.arguments.seed} {name}, warm-up").arrivals(
            mix.rates[0], WARM_UP_S, "warm-up"
        )

        async def measure_all() -> list[dict[str, Any]]:
            servers = (peer.servers for peer in self.running.values())
            return await asyncio.gather(*(measure(each, sent, few, "warm-up") for each in servers))

        for peer, point in zip(list(self.running), asyncio.run(measure_all()), strict=True):
            if point["num_failed"] == len(point["requests"]):
                self.left_out[peer] = f"{name}: {point['failures'][0]}"
                del self.running[peer]

    def _point(self, peer: str, name: str, rate: float, part: str, sent: Sequence[Sent]) -> dict[str, Any]:
        running, mix = self.running[peer], self.arguments.mixes[name]
        more = running.others
        if more:
            about = {"size": self.arguments.size, "mix": name, "seconds": self.arguments.seconds}
            more.ask("prepare", **about, rate=running.num_others * rate, part=part)
            more.send("run")
        cpu_before, counters_before = running.used()
        point = asyncio.run(measure(running.servers, sent, mix, part))
        cpu_after, counters_after = running.used()
        cpu_ms = {
            program: (seconds - cpu_before.get(program, 0.0)) * 1e3 / len(point["requests"])
            for program, seconds in cpu_after.items()
        }
        grown = {name: value - counters_before.get(name, 0.0) for name, value in counters_after.items()}
        encoder = {}
        if running.counters:
            encoder["images_per_s"] = grown["ve_encoded_items_total"] / point["seconds"]
            busy_s = grown.get("ve_device_busy_seconds_total", 0.0) / len(running.counters)
            encoder["device_busy_share"] = busy_s / point["seconds"]
        others = {"others": more.answer(self.arguments.seconds + 60)} if more else {}
        return {"cpu_ms": cpu_ms, "encoder": encoder, **others, **point}


def too_late(arguments: argparse.Namespace) -> str:
    """Why a point is left out that would begin after the time limit."""
    return f"{arguments.time_limit_s:g} s had passed"


# Results --------------------------------------------------------------------------------------------------


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    environment = describe_environment(
        torch.device(arguments.device), arguments.commit, (arguments.engine, "grpcio")
    )
    settings = {name: value for name, value in vars(arguments).items() if name not in NO_SETTINGS}
    return {
        "bench": "epd",
        "label": "Qwen3-VL with random weights",
        **environment,
        "settings": {
            **settings,
            "time_limit_s": None if math.isinf(arguments.time_limit_s) else arguments.time_limit_s,
            "mixes": {name: asdict(mix) for name, mix in arguments.mixes.items()},
            "peers": [{name: asdict(peer) for name, peer in group.items()} for group in arguments.peers],
            "all_arguments": engine_arguments(arguments),
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average_before": list(os.getloadavg()),
        },
        "complete": False,
        "groups": [],
        "left_out": {},
        "records": [],
    }


def measure_group(
    arguments: argparse.Namespace, number: int, checkpoint: Path, root: Path, ends_s: float, file: ResultFile
) -> None:
    """Starts the peers of a group, sends all mixes, and stops them. Writes each point when it has ended."""
    result, peers = file.result, arguments.peers[number]
    up = {name: Running([url]) for name, url in arguments.running if name in peers}
    missing = {name: peer for name, peer in peers.items() if name not in up}
    begun = time.monotonic()
    with started(arguments, missing, checkpoint, root / str(number)) as (group, running):
        running = {name: (up | running)[name] for name in peers if name in (up | running)}
        result["left_out"] |= {name: group.why_not(missing[name]) for name in missing if name not in running}
        about: dict[str, Any] = {"peers": list(running)}
        about |= {"start_s": time.monotonic() - begun, "encoder_start_s": group.encoder_start_s}
        result["groups"].append(about)
        load = Load(arguments, running, ends_s, result["left_out"])
        for record in load.records():
            result["records"].append(record)
            about["rows_come_by"] = {name: peer.rows_come_by() for name, peer in running.items()}
            file.write()
            print(
                f"{record['mix']} {record['rate']:g} {record['peer']}", *record["within"].values(), flush=True
            )


def main() -> None:
    arguments = parse_arguments()
    # SIGTERM must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    file = ResultFile(arguments.out, "epd", describe(arguments))
    root = Path(tempfile.mkdtemp(prefix="ve-epd-"))
    ends_s = time.monotonic() + arguments.time_limit_s
    try:
        checkpoint = make_checkpoint(arguments, root / "checkpoint")
        for number, peers in enumerate(arguments.peers):
            if time.monotonic() > ends_s:
                file.result["left_out"] |= dict.fromkeys(peers, too_late(arguments))
            else:
                measure_group(arguments, number, checkpoint, root, ends_s, file)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result = file.result
    result["complete"] = bool(result["records"]) and too_late(arguments) not in result["left_out"].values()
    result["summary"] = summary(result["records"])
    file.write()
    print(tables(result))
    print(draw_beside("epd", result, file.path))
    print(f"written to {file.path}")


if __name__ == "__main__":
    main()
