"""The whole path on one machine, in a minute: ``make demo``.

Makes a small checkpoint with random weights and a language model, starts the service as a separate process,
and sends it photographs. Prints the stages of a miss, a hit and a prefetch, runs the language model on the
rows, and compares its tokens with those of the full model on the pixels. Writes a picture of every image with
a grid of its visual tokens and its rows as colours. The weights are random, so the tokens have no meaning.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.harness.children import ServiceProcess
from encoder_service.checkpoints.synthetic import make_checkpoint
from lm_adapter import EncodedRows, ImageItem, PrefetchStatus, VisionEncoderClient
from lm_adapter.engines.hf import RemoteItem, import_transformers, load_language_model

ROOT = Path(__file__).resolve().parents[1]
PHOTOS = ROOT / "tests" / "data" / "photos"
STAGES = ("identify_ms", "admit_ms", "decode_ms", "resize_ms", "queue_ms", "tower_ms", "store_ms", "total_ms")
NEW_TOKENS = 12
MAX_LOGIT_ERROR = 2e-5
console = Console(width=140, markup=False, emoji=False)  # paths are no markup


@dataclass(frozen=True)
class EncodedPhoto:
    """One photograph and its rows."""

    path: Path
    data: bytes
    rows: EncodedRows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=ROOT / "demo-output")
    arguments.add_argument("--size", choices=("tiny", "small"), default="small")
    chosen = arguments.parse_args()
    started = time.monotonic()
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f"qwen3_vl-{chosen.size}"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, "qwen3_vl", chosen.size, 0, with_lm=True)
    console.print(f"checkpoint: {checkpoint} (random weights, Qwen3-VL layout, tower and language model)")

    paths = sorted(path for path in PHOTOS.iterdir() if path.suffix in (".jpg", ".png"))
    settings = {"model": checkpoint, "device": "cpu", "torch_threads": os.cpu_count()}
    settings |= {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "broker_path": ""}
    # In bfloat16 two right towers can differ by a token; here the tokens have to be equal.
    settings["dtype"] = "float32"
    with (
        ServiceProcess(settings, out / "service.log", gpu=None) as service,
        VisionEncoderClient(service.target, timeout_s=120) as client,
    ):
        console.print(f"service: a process of its own, at {service.target}")
        photos = show_cache(client, paths)
    written = draw(photos, out / "rows.png")
    error, ours, theirs = compare(checkpoint, photos)

    same = ours == theirs and error < MAX_LOGIT_ERROR
    summary = Table(title="summary", show_header=False)
    summary.add_row("images", ", ".join(f"{one.path.name} {grid_text(one.rows)}" for one in photos))
    num_rows = sum(one.rows.num_rows for one in photos)
    summary.add_row("rows", f"{num_rows} visual tokens of width {photos[0].rows.width}")
    summary.add_row("language model on our rows", " ".join(map(str, ours)))
    summary.add_row("full model on pixels", " ".join(map(str, theirs)))
    summary.add_row("relative error of the logits", f"{error:.1e} (at most {MAX_LOGIT_ERROR:.0e})")
    summary.add_row("same tokens", Text("yes", "green") if same else Text("NO", "red"))
    summary.add_row("picture", str(written))
    summary.add_row("took", f"{time.monotonic() - started:.1f} s")
    console.print(summary)
    return 0 if same else 1


def show_cache(client: VisionEncoderClient, paths: list[Path]) -> list[EncodedPhoto]:
    """Encodes every photograph and prints its stages. Two photographs are encoded by plain calls, which are
    then repeated as hits. Two are prefetched: one is fetched at once, so that the fetch joins the encode, and
    one a second later."""
    files = {path: path.read_bytes() for path in paths}
    *plain, joined, kept = paths
    table = Table(title="milliseconds by stage, in the service; the last column as the client saw it")
    for name in ("", "image", "grid", "rows", *(stage.removesuffix("_ms") for stage in STAGES), "client"):
        table.add_column(name, no_wrap=True)
    photos: dict[Path, EncodedPhoto] = {}

    def show(label: str, path: Path, rows: EncodedRows, begun: float) -> None:
        photos[path] = EncodedPhoto(path, files[path], rows)
        spent = [f"{getattr(rows.timings, stage):.1f}" for stage in STAGES]
        client_ms = f"{(time.perf_counter() - begun) * 1e3:.1f}"
        name = path.stem.partition("_")[0]
        table.add_row(label, name, grid_text(rows), str(rows.num_rows), *spent, client_ms)

    def encode(label: str, path: Path) -> None:
        begun = time.perf_counter()
        show(label, path, client.encode_one(ImageItem(files[path])), begun)

    def prefetch_then_fetch(label: str, path: Path, pause_s: float) -> float:
        begun = time.perf_counter()
        (announced,) = client.prefetch([ImageItem(files[path])])
        answered_ms = (time.perf_counter() - begun) * 1e3
        assert isinstance(announced, PrefetchStatus), announced
        time.sleep(pause_s)
        begun = time.perf_counter()
        (rows,) = client.fetch([announced.key])
        assert isinstance(rows, EncodedRows), rows
        show(label, path, rows, begun)
        return answered_ms

    client.info()  # connects before the first image is timed
    for path in plain:
        encode("miss", path)
    for path in plain:
        encode("hit", path)
    answered_ms = [
        prefetch_then_fetch("prefetch, fetched at once", joined, 0.0),
        prefetch_then_fetch("prefetch, a second later", kept, 1.0),
    ]
    console.print(table)
    console.print(
        f"each prefetch answered with key and grid within {max(answered_ms):.1f} ms; the tower ran on"
    )
    return [photos[path] for path in paths]


def compare(checkpoint: Path, photos: list[EncodedPhoto]) -> tuple[float, list[int], list[int]]:
    """Relative error of the prompt's logits, and the greedy tokens of both models."""
    reference = quiet_reference()

    processor = reference.AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}] * len(photos) + [{"type": "text", "text": "What is in these photographs?"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = processor.tokenizer(prompt)["input_ids"]
    items = [[RemoteItem.from_encoded(one.rows) for one in photos]]
    language_model = load_language_model(checkpoint)
    prefilled = language_model.prefill([ids], items, all_logits=True)
    assert prefilled.prompt_logits_NV is not None
    ours = language_model.generate([ids], items, max_new_tokens=NEW_TOKENS)[0]

    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(one.data))) for one in photos]
    inputs = processor(text=[prompt], images=images, return_tensors="pt")
    full = reference.Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = full(**inputs).logits[0]
        output = full.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    theirs = output[0, inputs["input_ids"].shape[1] :].tolist()
    difference = torch.linalg.norm(prefilled.prompt_logits_NV[0] - expected)
    return float(difference / torch.linalg.norm(expected)), ours, theirs


def quiet_reference() -> Any:
    """The transformers package, set to offline and without progress bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def draw(photos: list[EncodedPhoto], path: Path) -> Path:
    """Draws one line per photograph: the image with a grid of its visual tokens of 2 x 2 patches, then its
    rows: the three largest principal components of each level as red, green and blue."""
    names = ["main", *(f"deepstack {level}" for level in range(photos[0].rows.num_deepstack_levels))]
    num_columns = 1 + len(names)
    figure = Figure(figsize=(3.6 * num_columns, 3.2 * len(photos)), layout="constrained")
    panels = figure.subplots(len(photos), num_columns, squeeze=False)
    for one, (left, *others) in zip(photos, panels, strict=True):
        _, h, w = one.rows.grid_thw
        left.imshow(ImageOps.exif_transpose(Image.open(io.BytesIO(one.data))), extent=(0, w, h, 0))
        left.set_title(f"{one.path.name}, {w} x {h} patches of 16 pixels", fontsize=8)
        left.set_xticks(range(0, w + 1, 2), labels=[])
        left.set_yticks(range(0, h + 1, 2), labels=[])
        left.grid(color="white", alpha=0.6)
        values = one.rows.numpy().reshape(h // 2, w // 2, len(names), -1)
        for level, (name, axes) in enumerate(zip(names, others, strict=True)):
            axes.imshow(principal_colours(values[:, :, level]), interpolation="nearest")
            axes.set_title(f"{name}: {h // 2 * w // 2} rows", fontsize=8)
            axes.set_axis_off()
    figure.savefig(path)
    return path


def principal_colours(rows_HWD: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The three largest principal components of rows [H, W, D] as colours [H, W, 3]."""
    height, width, _ = rows_HWD.shape
    centred = rows_HWD.reshape(height * width, -1) - rows_HWD.mean((0, 1))
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    colours = centred @ directions[:3].T
    low, high = np.percentile(colours, (1, 99), axis=0)
    return np.clip((colours - low) / np.maximum(high - low, 1e-9), 0, 1).reshape(height, width, 3)


def grid_text(rows: EncodedRows) -> str:
    return "x".join(str(side) for side in rows.grid_thw)


if __name__ == "__main__":
    raise SystemExit(main())
