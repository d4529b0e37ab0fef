"""Goodput of ``epd.py --rates``: the rate of chat requests that a server takes while first tokens and times
between tokens stay within bounds.

Requests arrive at random times at a mean rate, whatever the server has left to do. In each round every server
gets the same requests at the same times. A conversation is a closed loop of many users instead. The times of
every request are kept, and bounds are applied to them afterwards.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.epd_requests import Pictures, Timed, body_of, message, send
from bench.measurement import percentile

BOUNDS = ((150.0, 10.0), (250.0, 15.0), (500.0, 25.0))
"""Most milliseconds to the first token, and between the tokens of a request in the mean."""
GOOD_SHARE = 0.9
WARM_UP_S = 6.0
PIXELS_OF_A_TOKEN = 32 * 32
TURN_PAUSE_S = 2.0
AT, FIRST, BETWEEN, LONGEST, TOTAL, FAILURE = range(6)
"""Places in the record of a request, which is a list because there are many: the second at which it was sent;
milliseconds to the first token, between tokens in the mean and at most, and to the end; why it failed."""


@dataclass(frozen=True)
class Kind:
    """One of a mix's kinds of request. share: of the requests; images: new ones in each."""

    share: float
    width: int
    height: int
    images: int


@dataclass(frozen=True)
class Mix:
    """kinds: none for a conversation. words: further tokens of text in each request; tokens: of each answer;
    rates: requests a second. as_text: text of as many tokens stands for the images, which is what the
    language model alone can do. clip_s: seconds of the clip that each file is; 0 for images. users, turns,
    window: of a conversation, in which each turn brings a new image and the last ``window`` images stay."""

    kinds: tuple[Kind, ...]
    words: int
    tokens: int
    rates: tuple[float, ...]
    as_text: bool = False
    clip_s: int = 0
    users: int = 0
    turns: int = 0
    window: int = 0


CHAT = (Kind(0.5, 448, 448, 1), Kind(0.35, 768, 768, 1), Kind(0.15, 1024, 1024, 1))
LARGE = (Kind(1.0, 2400, 1080, 1),)
MIXES = {
    "full": {
        "chat": Mix(CHAT, 64, 96, (10, 16, 22, 28)),
        "chat as text": Mix(CHAT, 64, 96, (16, 22, 28, 34), as_text=True),
        "documents": Mix((Kind(1.0, 1024, 1024, 4),), 64, 96, (2, 3.5, 5, 6)),
        "conversation": Mix(LARGE, 64, 128, (0,), users=30, turns=8, window=5),
        "clips": Mix((Kind(1.0, 448, 448, 1),), 64, 96, (2, 4, 6), clip_s=8),
    },
    "tiny": {
        "chat": Mix((Kind(0.5, 224, 224, 1), Kind(0.5, 112, 224, 1)), 4, 4, (1, 2)),
        "chat as text": Mix((Kind(1.0, 224, 224, 1),), 4, 4, (1,), as_text=True),
        "conversation": Mix((Kind(1.0, 224, 112, 1),), 4, 4, (0,), users=2, turns=3, window=2),
        "clips": Mix((Kind(1.0, 224, 224, 1),), 4, 4, (1,), clip_s=2),
    },
}
MIXES["small"] = MIXES["tiny"]


@dataclass(frozen=True)
class Sent:
    """A request on its way: when, in seconds from the beginning, and its bodies; several are the turns of
    one user."""

    at_s: float
    bodies: Iterable[bytes]


@dataclass(frozen=True)
class Conversation:
    """The bodies of a user's turns, made anew at each iteration: together they are long. asked: the number
    and the picture of each turn."""

    mix: Mix
    asked: tuple[tuple[int, bytes], ...]

    def __iter__(self) -> Iterator[bytes]:
        for last in range(1, len(self.asked) + 1):
            messages: list[dict[str, Any]] = []
            for turn, (number, picture) in enumerate(self.asked[:last]):
                files = (picture,) if turn >= last - self.mix.window else ()
                messages.append(message(number, files, self.mix.words))
                messages.append({"role": "assistant", "content": "It is a photograph."})
            yield body_of(messages[:-1], self.mix.tokens)


@dataclass
class Requests:
    """Makes the requests of one mix. Files are new in each, except a conversation's earlier ones."""

    mix: Mix
    seed: str
    _number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._choice = random.Random(self.seed)
        self._pictures = {
            kind: Pictures((kind.width, kind.height), self._choice, self.mix.clip_s, keeps=False)
            for kind in self.mix.kinds
            if not self.mix.as_text
        }

    def arrivals(self, rate: float, seconds: float) -> list[Sent]:
        """Those of a Poisson process; of a conversation, one for each user."""
        sent: list[Sent] = []
        at_s = 0.0
        while self.mix.users and len(sent) < self.mix.users:
            sent.append(Sent(self._choice.uniform(0, TURN_PAUSE_S * 2), self._conversation()))
        while not self.mix.users and at_s < seconds:
            sent.append(Sent(at_s, (self._request(),)))
            at_s += self._choice.expovariate(rate)
        return sent

    def _request(self) -> bytes:
        (kind,) = self._choice.choices(self.mix.kinds, [kind.share for kind in self.mix.kinds])
        if self.mix.as_text:
            words = self.mix.words + kind.images * kind.width * kind.height // PIXELS_OF_A_TOKEN
            return body_of([message(self._next(), (), words)], self.mix.tokens)
        files = [self._pictures[kind].take(0) for _ in range(kind.images)]
        return body_of([message(self._next(), files, self.mix.words)], self.mix.tokens)

    def _conversation(self) -> Conversation:
        (kind,) = self.mix.kinds
        asked = ((self._next(), self._pictures[kind].take(0)) for _ in range(self.mix.turns))
        return Conversation(self.mix, tuple(asked))

    def _next(self) -> int:
        """A number that no other request of the run has."""
        self._number += 1
        return self._choice.randrange(10**6) * 10**6 + self._number


async def measure(
    urls: Sequence[str], requests: Sequence[Sent], tokens: int, seed: str
) -> tuple[list[list[Any]], float]:
    """Sends the requests, to the URLs in turns. Returns a record of each, and the seconds of all."""
    found: list[list[Any]] = []
    timeout, connector = aiohttp.ClientTimeout(total=180), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as client:
        begun = time.perf_counter()

        async def one(number: int, request: Sent) -> None:
            pauses = random.Random(f"{seed} {number}")
            bodies = iter(request.bodies)
            turn = 0
            # On a thread: the loop takes the times of all others.
            while (body := await asyncio.to_thread(next, bodies, None)) is not None:
                if turn:
                    await asyncio.sleep(pauses.expovariate(1 / TURN_PAUSE_S))
                turn += 1
                at_s = time.perf_counter() - begun
                try:
                    timed = await send(client, urls[number % len(urls)], body)
                except (aiohttp.ClientError, TimeoutError) as error:
                    timed = Timed(0.0, 0.0, (), repr(error)[:200])
                gaps = timed.gaps_ms or (0.0,)
                # vLLM may send several tokens at once; the mean is over all tokens.
                between_ms = sum(gaps) / max(1, tokens - 1)
                times = (timed.first_ms, between_ms, max(gaps), timed.total_ms)
                found.append([round(at_s, 3), *(round(value, 2) for value in times), timed.failure])

        tasks = []
        for number, request in enumerate(sorted(requests, key=lambda sent: sent.at_s)):
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun)))
            tasks.append(asyncio.create_task(one(number, request)))
        await asyncio.gather(*tasks)
        return found, time.perf_counter() - begun


def run_mix(
    urls: Mapping[str, Sequence[str]], name: str, mix: Mix, *, rounds: int, seconds: float, seed: int
) -> list[dict[str, Any]]:
    """All rates and rounds of a mix. urls: of each server, which may be several processes. The order of the
    servers is reversed in every second round."""
    requests = Requests(mix, f"{seed} {name}")
    warm = requests.arrivals(mix.rates[0], WARM_UP_S)
    for each in urls.values():
        asyncio.run(measure(each, warm, mix.tokens, "warm-up"))
    records = []
    for turn in range(rounds):
        for rate in mix.rates:
            sent = requests.arrivals(rate, seconds)
            for server in list(urls) if turn % 2 == 0 else list(urls)[::-1]:
                found, took_s = asyncio.run(measure(urls[server], sent, mix.tokens, f"{seed} {turn}"))
                point = {"mix": name, "rate": rate, "server": server, "round": turn, "seconds": took_s}
                records.append({**point, **figures(found), "requests": found})
    return records


def figures(requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Of one point. A request that failed is outside of all bounds."""
    good = [one for one in requests if not one[FAILURE]]
    first, between = [one[FIRST] for one in good], [one[BETWEEN] for one in good]
    return {
        "num_failed": len(requests) - len(good),
        "failures": sorted({one[FAILURE] for one in requests if one[FAILURE]})[:3],
        "first_token_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)} if good else None,
        "between_tokens_ms": {"p50": percentile(between, 0.5), "p99": percentile(between, 0.99)}
        if good
        else None,
        "within": {
            label(bound): sum(one[FIRST] <= bound[0] and one[BETWEEN] <= bound[1] for one in good)
            / len(requests)
            for bound in BOUNDS
        },
    }


def label(bound: tuple[float, float]) -> str:
    return "{:g}/{:g}".format(*bound)


def goodput(shares: Mapping[float, float]) -> float:
    """Requests a second up to which GOOD_SHARE of them are within a bound, from the share at each rate,
    interpolated. 0 if it is less at the lowest rate, infinite if it is as much at the highest: what lies
    beyond was not measured."""
    kept = 0.0, 1.0
    for rate, share in sorted(shares.items()):
        if share < GOOD_SHARE:
            if not kept[0]:
                return 0.0
            return kept[0] + (rate - kept[0]) * (kept[1] - GOOD_SHARE) / (kept[1] - share)
        kept = rate, share
    return math.inf


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each mix, rate and server the median over the rounds, with the minimum and the maximum; then the
    goodput of each mix and server in every bound, as text of its least and greatest round."""
    rows: list[dict[str, Any]] = []
    for mix, rate, server in dict.fromkeys((one["mix"], one["rate"], one["server"]) for one in records):
        mine = [one for one in records if (one["mix"], one["rate"], one["server"]) == (mix, rate, server)]
        row: dict[str, Any] = {"mix": mix, "rate": rate, "server": server}
        row["num_failed"] = sum(one["num_failed"] for one in mine)
        for name in ("first_token_ms", "between_tokens_ms"):
            for part in ("p50", "p99"):
                row[f"{name} {part}"] = spread([one[name][part] for one in mine if one[name]])
        row["within"] = {name: spread([one["within"][name] for one in mine]) for name in mine[0]["within"]}
        rows.append(row)
    for mix, server in dict.fromkeys((one["mix"], one["server"]) for one in records if one["rate"]):
        mine = [one for one in records if (one["mix"], one["server"]) == (mix, server)]
        rates = sorted({one["rate"] for one in mine})
        by_round: dict[str, list[float]] = {name: [] for name in mine[0]["within"]}
        for turn in dict.fromkeys(one["round"] for one in mine):
            for name, found in by_round.items():
                shares = {one["rate"]: one["within"][name] for one in mine if one["round"] == turn}
                found.append(goodput(shares))
        texts = {
            name: " to ".join(dict.fromkeys(goodput_text(one, rates) for one in (min(found), max(found))))
            for name, found in by_round.items()
        }
        rows.append({"mix": mix, "server": server, "goodput": texts})
    return rows


def goodput_text(value: float, rates: Sequence[float]) -> str:
    """In requests a second. rates: that were measured."""
    if value in (0.0, math.inf):
        return f"under {rates[0]:g}" if not value else f"over {rates[-1]:g}"
    return f"{value:.1f}"


def spread(values: Sequence[float]) -> list[float] | None:
    return [statistics.median(values), min(values), max(values)] if values else None
