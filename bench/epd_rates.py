"""The loads of ``epd.py``: mixes of chat requests, and the times that servers take for them.

Requests arrive at random times at a mean rate, whatever the server has left to do. A conversation is a
closed loop of many users instead, and so are the mixes with callers. In each round every peer gets the same
kinds of requests at the same times. The times of every request are kept; ``epd_figures`` applies bounds to
them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from bench.epd_figures import figures, percentiles
from bench.epd_requests import Pictures, Timed, body_of, message, send

WARM_UP_S = 6.0
PIXELS_OF_A_TOKEN = 32 * 32
TURN_PAUSE_S = 2.0


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
    language model alone can do; one peer is asked. clip_s: seconds of the clip that each file is; 0 for
    images. users, turns, window: of a conversation, in which each turn brings a new image and the last
    ``window`` images stay; without a window each turn is a request of its own, without a pause."""

    kinds: tuple[Kind, ...]
    words: int
    tokens: int
    rates: tuple[float, ...] = (0,)
    as_text: bool = False
    clip_s: int = 0
    users: int = 0
    turns: int = 0
    window: int = 0

    @property
    def is_closed_loop(self) -> bool:
        """Each caller sends its next request when it has an answer."""
        return bool(self.users) and not self.window


CHAT = (Kind(0.5, 448, 448, 1), Kind(0.35, 768, 768, 1), Kind(0.15, 1024, 1024, 1))
LARGE = (Kind(1.0, 2400, 1080, 1),)
TALKS = Mix(LARGE, 64, 128, users=30, turns=8, window=5)
FEW_TALKS = Mix((Kind(1.0, 224, 112, 1),), 4, 4, users=2, turns=3, window=2)
SMALL, MEDIUM = Kind(1.0, 448, 448, 1), Kind(1.0, 1024, 1024, 1)
MIXES = {
    "full": {
        "chat": Mix(CHAT, 64, 96, (10, 16, 22, 28)),
        "documents": Mix((replace(MEDIUM, images=4),), 64, 96, (2, 3.5, 5, 6)),
        "448, 1 caller": Mix((SMALL,), 0, 1, users=1, turns=32),
        "4x448, 16 callers": Mix((replace(SMALL, images=4),), 0, 1, users=16, turns=8),
        "1024, 32 callers": Mix((MEDIUM,), 0, 1, users=32, turns=4),
        "448, 64 tokens, 32 callers": Mix((SMALL,), 0, 64, users=32, turns=6),
        "conversation": TALKS,
        "chat as text": Mix(CHAT, 64, 96, (16, 22, 28, 34), as_text=True),
        "conversation as text": replace(TALKS, as_text=True),
        "clips": Mix((SMALL,), 64, 96, (2, 4, 6), clip_s=8),
    },
    "tiny": {
        "chat": Mix((Kind(0.5, 224, 224, 1), Kind(0.5, 112, 224, 1)), 4, 4, (1, 2)),
        "chat as text": Mix((Kind(1.0, 224, 224, 1),), 4, 4, (1,), as_text=True),
        "conversation": FEW_TALKS,
        "conversation as text": replace(FEW_TALKS, as_text=True),
        "4x112, 2 callers": Mix((Kind(1.0, 112, 112, 4),), 0, 2, users=2, turns=2),
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
    of each turn, its picture, or none, and the words in place of a picture."""

    mix: Mix
    asked: tuple[tuple[int, Sequence[bytes], int], ...]

    def __iter__(self) -> Iterator[bytes]:
        for last in range(1, len(self.asked) + 1):
            messages: list[dict[str, Any]] = []
            for turn, (number, files, more) in enumerate(self.asked[:last]):
                is_seen = turn >= last - self.mix.window
                words = self.mix.words + (more if is_seen else 0)
                messages.append(message(number, files if is_seen else (), words))
                messages.append({"role": "assistant", "content": "It is a photograph."})
            yield body_of(messages[:-1], self.mix.tokens)


@dataclass
class Requests:
    """Makes the requests of one mix. Files are new in each, except a conversation's earlier ones."""

    mix: Mix
    seed: str
    _mark: bytes = field(default=b"", init=False)
    _number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._choice = random.Random(self.seed)
        self._pictures = {
            kind: Pictures((kind.width, kind.height), self._choice, self.mix.clip_s)
            for kind in self.mix.kinds
            if not self.mix.as_text
        }

    def arrivals(self, rate: float, seconds: float, part: str, whose: str = "") -> list[Sent]:
        """Those of a Poisson process; of a closed loop, one for each user. part: of the run; in the same one
        all have the same kinds at the same times, but files and texts of their own: peers share processes."""
        self._choice, self._mark = random.Random(f"{self.seed} {part}"), whose.encode()
        sent: list[Sent] = []
        at_s = 0.0
        while self.mix.window and len(sent) < self.mix.users:
            sent.append(Sent(self._choice.uniform(0, TURN_PAUSE_S * 2), self._conversation()))
        while len(sent) < self.mix.users:
            sent.append(Sent(0.0, tuple(self._request() for _ in range(self.mix.turns))))
        while not self.mix.users and at_s < seconds:
            sent.append(Sent(at_s, (self._request(),)))
            at_s += self._choice.expovariate(rate)
        return sent

    def _request(self) -> bytes:
        (kind,) = self._choice.choices(self.mix.kinds, [kind.share for kind in self.mix.kinds])
        files, more = self._shown(kind)
        return body_of([message(self._next(), files, self.mix.words + more)], self.mix.tokens)

    def _conversation(self) -> Conversation:
        (kind,) = self.mix.kinds
        asked = ((self._next(), *self._shown(kind)) for _ in range(self.mix.turns))
        return Conversation(self.mix, tuple(asked))

    def _shown(self, kind: Kind) -> tuple[list[bytes], int]:
        """New files, and no word; or none, and as many words as they have tokens."""
        if self.mix.as_text:
            return [], kind.images * kind.width * kind.height // PIXELS_OF_A_TOKEN
        return [self._pictures[kind].take(self._choice, self._mark) for _ in range(kind.images)], 0

    def _next(self) -> int:
        """A number that no other request of the run has."""
        self._number += 1
        return self._choice.randrange(10**6) * 10**6 + self._number


async def measure(servers: Sequence[str], arrivals: Sequence[Sent], mix: Mix, seed: str) -> dict[str, Any]:
    """Sends the requests, to the servers (URLs) in turns. Returns figures, and a record of each request."""
    found: list[list[Any]] = []
    all_gaps: list[float] = []
    timeout, connector = aiohttp.ClientTimeout(total=180), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as client:
        begun = time.perf_counter()

        async def one(number: int, request: Sent) -> None:
            pauses = random.Random(f"{seed} {number}")
            bodies = iter(request.bodies)
            turn = 0
            # On a thread: the loop takes the times of all others.
            while (body := await asyncio.to_thread(next, bodies, None)) is not None:
                if turn and mix.window:
                    await asyncio.sleep(pauses.expovariate(1 / TURN_PAUSE_S))
                turn += 1
                at_s = time.perf_counter() - begun
                try:
                    timed = await send(client, servers[number % len(servers)], body)
                except (aiohttp.ClientError, TimeoutError) as error:
                    timed = Timed(0.0, 0.0, (), repr(error)[:200])
                all_gaps.extend(timed.gaps_ms)
                gaps = timed.gaps_ms or (0.0,)
                # vLLM may send several tokens at once; the mean is over all tokens.
                between_ms = sum(gaps) / max(1, mix.tokens - 1)
                times = (timed.first_ms, between_ms, max(gaps), timed.total_ms)
                found.append([round(at_s, 3), *(round(value, 2) for value in times), timed.failure])

        tasks = []
        for number, request in enumerate(sorted(arrivals, key=lambda sent: sent.at_s)):
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun)))
            tasks.append(asyncio.create_task(one(number, request)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun
    point = figures(found)
    rate = (len(found) - point["num_failed"]) / seconds
    gaps_ms = percentiles(all_gaps)
    # One line each in a file, because there are many.
    requests = [" ".join(map(str, one)) for one in found]
    return {"seconds": seconds, "requests_per_s": rate, "gaps_ms": gaps_ms, **point, "requests": requests}
