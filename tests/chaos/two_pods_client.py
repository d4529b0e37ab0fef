"""The reader's pod of ``two_pods``: one process with whole clients of the adapter, told what to do.

Run as ``python -m tests.chaos.two_pods_client TARGET KIND``; KIND is ``device`` or ``host`` for the way in
which rows have to come, ``any`` for the best one. Reads one command in JSON from each line of its input and
answers with one line. A GPU is cuda:0 here, whichever it is on the host.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lm_adapter import EncodedRows, EncoderError, ImageItem, PrefetchStatus, VisionEncoderClient
from lm_adapter.transport.broker_errors import BrokerUnavailable
from tests.integration.images import photo
from tests.unit.lm_adapter.connector_rig import Engine, engine_config

PATIENCE_S = 30.0


def digest_of(rows: torch.Tensor) -> str:
    return hashlib.sha256(bytes(rows.contiguous().view(-1).view(torch.uint8).cpu().numpy())).hexdigest()


class Pod:
    """An LM server's stand-in: its own memory on the GPU, a captured graph, and two clients."""

    def __init__(self, target: str, kind: str) -> None:
        self.target = target
        self.device = torch.device("cuda:0" if kind == "device" else "cpu")
        transports = ("device", "host", "inline") if kind == "any" else (kind, "inline")
        self.client = VisionEncoderClient(
            target,
            transports=transports,
            device="cuda:0" if kind == "device" else None,
            timeout_s=60,
        )
        self.inline = VisionEncoderClient(target, transports=("inline",), timeout_s=60)
        self.seen: dict[int, torch.Tensor] = {}
        self.borrowed: list[EncodedRows] = []
        if kind == "device":
            self._capture()

    def _capture(self) -> None:
        """What an engine has before it ever meets an encoder."""
        self.number = torch.ones(4096, device=self.device)
        self.doubled = torch.zeros_like(self.number)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            torch.mul(self.number, 2, out=self.doubled)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            torch.mul(self.number, 2, out=self.doubled)

    def item(self, image: list[int]) -> ImageItem:
        width, height, seed = image
        return ImageItem(photo(width, height, seed=seed))

    # -- commands --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        choice = self.client.wait_transport()
        return {
            "pid": os.getpid(),
            "num_devices": torch.cuda.device_count(),
            "transport": choice.name,
            "reason": choice.reason,
        }

    def until(self, transport: str, image: list[int]) -> dict[str, Any]:
        """Calls until rows come in this way, by nothing but calls; errors on the way are counted."""
        started_s, num_failed = time.monotonic(), 0
        while time.monotonic() < started_s + PATIENCE_S:
            try:
                rows = self.client.encode_one(self.item(image), confirm_later=True, timeout_s=2)
                rows.confirm()
            except EncoderError:
                num_failed += 1
                time.sleep(0.02)
                continue
            if (rows.reading is not None) == (transport != "inline") and (
                self.client.transport.name == transport
            ):
                break
            time.sleep(0.02)
        return {
            "transport": self.client.transport.name,
            "reason": self.client.transport.reason,
            "num_failed": num_failed,
            "seconds": round(time.monotonic() - started_s, 2),
        }

    def compare(self, images: list[list[int]], concurrency: int) -> dict[str, Any]:
        """Rows in the way under test against the very same rows inline, several images at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            found = list(pool.map(self._compare_one, range(len(images)), images))
        return {
            "equal": sum(is_equal for is_equal, _, _ in found),
            "by_lease": sum(by_lease for _, by_lease, _ in found),
            "worst": max(error for _, _, error in found),
        }

    def _compare_one(self, number: int, image: list[int]) -> tuple[bool, bool, float]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if number % 3 == 2:
            with self.client.encode_one(self.item(image), borrow=True) as rows:
                found = rows.torch().clone()
        else:
            rows = self.client.encode_one(self.item(image), confirm_later=True)
            found = rows.torch().clone()
            rows.confirm()
        by_lease = rows.reading is not None
        (inline,) = self.inline.fetch([rows.key])
        assert isinstance(inline, EncodedRows), inline
        is_equal = torch.equal(found.cpu(), inline.torch())
        known = self.seen.setdefault(image[2], inline.torch().clone())
        error = (known.float() - found.cpu().float()).norm() / known.float().norm()
        return is_equal and (not by_lease or found.device == self.device), by_lease, float(error)

    def reread(self, images: list[list[int]], concurrency: int) -> dict[str, Any]:
        """Rows that are resident by now, each by key four times: into fresh memory and into a buffer."""
        items = [self.item(image) for image in images]
        rows = [outcome for outcome in self.client.encode(items) if isinstance(outcome, EncodedRows)]
        inline = self.inline.fetch([one.key for one in rows])

        def read(number: int) -> int:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            key, expected = rows[number].key, inline[number]
            assert isinstance(expected, EncodedRows), expected
            out, num_equal = torch.zeros(expected.num_bytes, dtype=torch.uint8, device=self.device), 0
            for given in ({}, {"out": [out]}, {}, {"out": [out]}):
                (found,) = self.client.fetch([key], **given)
                assert isinstance(found, EncodedRows), found
                num_equal += torch.equal(found.torch().cpu(), expected.torch())
                out.zero_()
            return num_equal

        with ThreadPoolExecutor(concurrency) as pool:
            num_equal = sum(pool.map(read, range(len(rows))))
        return {"resident": self.client.transport.resident, "equal": num_equal}

    def hold(self, images: list[list[int]]) -> dict[str, Any]:
        """Takes leases and keeps them."""
        self.borrowed = [self.client.encode_one(self.item(image), borrow=True) for image in images]
        return {"held": sum(rows.reading is not None for rows in self.borrowed)}

    def stale(self) -> dict[str, Any]:
        """What became of the leases that are held."""
        num_stale = 0
        for rows in self.borrowed:
            try:
                rows.confirm()
            except EncoderError:
                num_stale += 1
        self.borrowed = []
        return {"stale": num_stale}

    def share(self, image: list[int], num_readers: int) -> dict[str, Any]:
        rows = self.client.encode_one(self.item(image), num_readers=num_readers)
        return {
            "digest": digest_of(rows.torch()),
            "transport": rows.shared.transport if rows.shared else "alone",
            "record": base64.b64encode(pickle.dumps(rows.shared)).decode(),
            "num_bytes": rows.num_bytes,
        }

    def read(self, record: str, reader: int, num_bytes: int) -> dict[str, Any]:
        """As one of the other ranks, into a buffer of its own."""
        out = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.client.wait_transport()
        rows = self.client.read_shared(pickle.loads(base64.b64decode(record)), reader=reader, out=out)
        return {"digest": digest_of(rows.torch()), "in_place": digest_of(out) == digest_of(rows.torch())}

    def undisturbed(self, images: list[list[int]]) -> dict[str, Any]:
        """Rows into a buffer that is there: neither the allocator nor a graph notices."""
        torch.cuda.synchronize()
        num_bytes = max(self.client.encode_one(self.item(image)).num_bytes for image in images)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._replay_is_right()
        torch.cuda.synchronize()
        before = dict(torch.cuda.memory_stats(self.device))
        for image in images:
            self.client.encode_one(self.item(image), out=[out])
        torch.cuda.synchronize()
        after = dict(torch.cuda.memory_stats(self.device))
        return {"allocator": before == after, "graph": self._replay_is_right()}

    def _replay_is_right(self) -> bool:
        self.number.add_(1)
        self.graph.replay()
        return bool((self.doubled == self.number * 2).all())

    def engine(self, config: str, backend: str, images: list[list[int]]) -> dict[str, Any]:
        """As a vLLM engine in this pod, without vLLM: its connector fetches one image until rows come as they
        are to come, then the others, and the encoder cache is filled with them."""
        prefetched = self.inline.prefetch([self.item(image) for image in images])
        keys = [one.key for one in prefetched if isinstance(one, PrefetchStatus)]
        inline = [one for one in self.inline.fetch(keys) if isinstance(one, EncodedRows)]
        items = [(one.key, one.grid_thw) for one in inline]
        expected = {one.key.hex(): one.torch() for one in inline}
        engine = Engine(
            engine_config(
                self.target,
                backend,
                hf_config=json.loads(Path(config).read_text()),
                dtype=inline[0].dtype,
                device=self.device,
            )
        )
        try:
            warm = engine.request("warm", items[:1])
            engine.fetch(warm)
            engine.finish(warm)
            client = engine.scheduler._fetcher._source._client
            transport = asyncio.run(client.wait_transport(PATIENCE_S)).name
            request = engine.request("request", items[1:])
            engine.fetch(request)
            engine.load(engine.schedule(request))
            engine.finish(request)
        finally:
            engine.close()
        cache = engine.encoder_cache
        return {
            "transport": transport,
            "loaded": len(cache),
            "equal": sum(torch.equal(rows.cpu(), expected[key]) for key, rows in cache.items()),
            "on_device": sum(rows.device == self.device for rows in cache.values()),
        }

    def cut(self) -> dict[str, Any]:
        """The connection to the broker breaks."""
        broker = self.client._session.transports._broker
        assert broker is not None
        link = broker._link
        assert link is not None
        link.lose(BrokerUnavailable("cut by the test"))
        return {}


def main(target: str, kind: str) -> None:
    pod = Pod(target, kind)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(pod, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
