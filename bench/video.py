"""A clip's file to its rows: this service against the reference's pipeline, on the same file in one run.

    python bench/video.py --device cpu --size tiny --quick    # does it run at all, a minute
    python bench/video.py                                     # full size, bfloat16, cuda:0

Owns the clip, the comparison and its table. The service runs in this process behind gRPC on loopback, each
time under another namespace, so that nothing is found in its store. The reference reads the file with its
PyAV reader, resizes, normalises and cuts patches with its default video processor, and runs its tower.
Variants take turns in a new order each round. Rows are compared before anything is timed.

Times are milliseconds. ``ours``: ``end_to_end`` from the call to the last row in the client, which come
inline, ``first_rows`` to the first ones, ``admit`` until the clip is open and let in. ``ours_shared``: rows
by lease in the encoder's memory, on a GPU the device's, copied from there by the client. ``ours_reading``:
opening, decoding and resizing all frames that are sampled, without a service or a tower, with the service's
threads. ``reference``: ``decode``, ``process``, ``tower``, and ``end_to_end`` of all three, its rows in host
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "proto"))

from measurement import RESULTS, ResultFile, describe_environment, synchronise
from rich.console import Console
from rich.table import Table

from encoder_service.app import Service
from encoder_service.config import parse_settings
from encoder_service.ingest.cores import usable_cores
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.video.source import clip_limits
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import EncodedFile, Grid, PreprocessOptions
from lm_adapter import ClipItem, EncodedRows, VisionEncoderClient

ENCODERS = {"h264": "libx264", "vp9": "libvpx-vp9", "mpeg4": "mpeg4"}


def made_clip(seconds: float, fps: int, width: int, height: int, codec: str) -> bytes:
    """An MP4 file of random blocks that drift sideways."""
    rng = np.random.default_rng()
    base = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    picture = np.kron(base, np.ones((16, 16, 1), np.uint8))[:height, :width]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream(ENCODERS[codec], rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for place in range(int(seconds * fps)):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 4 * place, axis=1), format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, fps)
            for packet in stream.encode(frame):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)
    return file.getvalue()


class RunningService:
    """The service on an event loop of its own thread; a context manager."""

    def __init__(self, **settings: object) -> None:
        self._settings = parse_settings(**settings)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._error: BaseException | None = None

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = Service(self._settings)
        try:
            await self._service.start()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()
        await self._service.wait()
        await self._service.stop()

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self._service.addresses[0]

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._service.request_stop)
        self._thread.join(60)


class Ours:
    """One call of the service, and reading alone."""

    def __init__(self, target: str, checkpoint: Path, family: str, data: bytes, device: torch.device) -> None:
        self._target, self._data, self._device = target, data, device
        limits = clip_limits(parse_settings(model=checkpoint), 1 << 30, usable_cores())
        self._preprocessor = load_preprocessor(checkpoint, family, DecodeLimits(1 << 30, 1 << 30), limits)

    def run_shared(self) -> dict[str, float]:
        ways = ("device",) if self._device.type == "cuda" else ("host",)
        with VisionEncoderClient(
            self._target,
            namespace=secrets.token_hex(8),
            transports=ways,
            device=str(self._device) if self._device.type == "cuda" else None,
        ) as client:
            client.wait_transport()
            begun_s = time.perf_counter()
            rows = client.encode_one(ClipItem(self._data), timeout_s=600)
            rows.torch()
            synchronise(self._device)
            return {"end_to_end": (time.perf_counter() - begun_s) * 1e3}

    def run(self) -> tuple[EncodedRows, dict[str, float]]:
        first_s = 0.0

        def tell(_: int, __: EncodedRows, ___: int) -> None:
            nonlocal first_s
            first_s = first_s or time.perf_counter()

        with VisionEncoderClient(
            self._target, namespace=secrets.token_hex(8), transports=("inline",)
        ) as client:
            client.info()
            begun_s = time.perf_counter()
            rows = client.encode_one(ClipItem(self._data), timeout_s=600, on_rows=tell)
            ended_s = time.perf_counter()
        timings = rows.timings
        times = {
            "end_to_end": (ended_s - begun_s) * 1e3,
            "first_rows": (first_s - begun_s) * 1e3,
            "admit": timings.admit_ms,
        }
        return rows, times

    def read_alone(self) -> dict[str, float]:
        assert self._preprocessor.clips is not None
        begun_s = time.perf_counter()
        clip = self._preprocessor.clips.open(EncodedFile(self._data), PreprocessOptions())
        opened_s = time.perf_counter()
        for _ in clip.pieces(8192):
            pass
        return {
            "open": (opened_s - begun_s) * 1e3,
            "decode": clip.decode_ms,
            "resize": clip.resize_ms,
            "read_alone": (time.perf_counter() - begun_s) * 1e3,
        }


class Theirs:
    """The reference's reader, processor and tower. device, dtype: of the tower."""

    def __init__(
        self, checkpoint: Path, family: str, file: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        from tests.parity.reference import ReferenceTower, import_reference

        transformers = import_reference()
        transformers.logging.set_verbosity_error()
        self._device, self._file = device, file
        self._tower = ReferenceTower(checkpoint, device=device, dtype=dtype)
        if family == "kimi_k25":
            from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

            self._processor = Kimi_K25VideoProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
        else:
            self._processor = transformers.Qwen3VLVideoProcessor.from_pretrained(checkpoint)

    @torch.inference_mode()
    def run(self) -> tuple[torch.Tensor, dict[str, float]]:
        from transformers.video_utils import load_video

        begun_s = time.perf_counter()
        sample = partial(self._processor.sample_frames, fps=2)
        frames, metadata = load_video(str(self._file), backend="pyav", sample_indices_fn=sample)
        decoded_s = time.perf_counter()
        batch = self._processor(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
            input_data_format="channels_first",
        )
        pixels = batch["pixel_values_videos"]
        grids = [Grid(*grid) for grid in batch["video_grid_thw"].tolist()]
        processed_s = time.perf_counter()
        rows = self._tower.rows(pixels.reshape(pixels.shape[0], -1), grids).cpu()
        synchronise(self._device)
        ended_s = time.perf_counter()
        return rows, {
            "decode": (decoded_s - begun_s) * 1e3,
            "process": (processed_s - decoded_s) * 1e3,
            "tower": (ended_s - processed_s) * 1e3,
            "end_to_end": (ended_s - begun_s) * 1e3,
        }


def measure(family: str, arguments: argparse.Namespace, data: bytes, folder: Path) -> dict[str, Any]:
    """One family's record: medians of both pipelines and how far their rows are apart."""
    checkpoint = folder / family
    make_checkpoint(checkpoint, family, arguments.size, secrets.randbelow(1 << 20))
    file = folder / "clip.mp4"
    file.write_bytes(data)
    settings = {
        "model": checkpoint,
        "device": str(arguments.device),
        "dtype": arguments.dtype,
        "listen": ("127.0.0.1:0",),
        "admin_listen": "",
        "broker_path": str(folder / "broker.sock"),
        "arena_bytes": 2 << 30,
    }
    theirs = Theirs(checkpoint, family, file, arguments.device, getattr(torch, arguments.dtype))
    with RunningService(**settings) as target:
        ours = Ours(target, checkpoint, family, data, arguments.device)
        rows, _ = ours.run()
        expected, _ = theirs.run()
        found = rows.torch().double()
        relative = float((found - expected.double()).norm() / expected.double().norm())
        if arguments.dtype == "float32" and not relative < 1e-4:
            raise SystemExit(f"{family}: rows are {relative:.1e} from the reference's, 1e-4 are allowed")
        samples: dict[str, list[float]] = defaultdict(list)
        runs = {
            "ours": lambda: ours.run()[1],
            "ours_shared": ours.run_shared,
            "ours_reading": ours.read_alone,
            "reference": lambda: theirs.run()[1],
        }
        for done in range(arguments.repeats):
            order = list(runs)
            random.Random(done).shuffle(order)
            for name in order:
                for stage, milliseconds in runs[name]().items():
                    samples[f"{name}.{stage}"].append(milliseconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "family": family,
        "grid_thw": list(rows.grid_thw),
        "num_frames": len(rows.timestamps_s),
        "num_rows": rows.num_rows,
        "relative_error": relative,
        "speedup": medians["reference.end_to_end"] / medians["ours.end_to_end"],
        "medians_ms": medians,
        "samples_ms": samples,
    }


def show(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "family", "frames", "rows", "stage", "service ms", "reference ms", title="A clip's file to rows"
    )
    for record in records:
        medians = record["medians_ms"]
        decode_ms = medians["ours_reading.open"] + medians["ours_reading.decode"]
        lines = [
            ("end to end", medians["ours.end_to_end"], medians["reference.end_to_end"]),
            ("rows by lease", medians["ours_shared.end_to_end"], medians["reference.end_to_end"]),
            ("first rows", medians["ours.first_rows"], medians["reference.end_to_end"]),
            ("decode", decode_ms, medians["reference.decode"]),
            ("resize (and cut)", medians["ours_reading.resize"], medians["reference.process"]),
        ]
        for stage, own, other in lines:
            table.add_row(
                record["family"],
                str(record["num_frames"]),
                str(record["num_rows"]),
                stage,
                f"{own:.1f}",
                f"{other:.1f}",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--size", default="full", choices=["tiny", "small", "full"])
    parser.add_argument("--families", nargs="+", default=["qwen3_vl", "qwen3_5", "kimi_k25"])
    parser.add_argument("--codec", default="h264", choices=sorted(ENCODERS))
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the clip")
    parser.add_argument("--fps", type=int, default=30)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a few seconds of small frames, three rounds")
    parser.add_argument("--commit", help="when this is no checkout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.width, arguments.height, arguments.repeats = 6.0, 320, 240, 3
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device.type == "cuda" else "float32")
    console = Console(stderr=True)
    data = made_clip(arguments.seconds, arguments.fps, arguments.width, arguments.height, arguments.codec)
    settings = {
        name: str(value) if isinstance(value, torch.device) else value
        for name, value in vars(arguments).items()
        if name not in ("out", "commit")
    }
    result = describe_environment(arguments.device, arguments.commit, packages=("av",)) | {
        "settings": settings | {"file_bytes": len(data)},
        "complete": False,
        "records": [],
    }
    file = ResultFile(arguments.out, "video", result)
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families:
            result["records"].append(measure(family, arguments, data, Path(folder)))
            file.write()
    result["complete"] = True
    file.write()
    show(result["records"], Console())
    console.print(f"wrote {file.path.name}")


if __name__ == "__main__":
    main()
