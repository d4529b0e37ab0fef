"""The whole path on one machine, in a minute: ``make demo``.

Makes a small checkpoint with random weights and a language model, starts the service as a separate process,
and sends it photographs. Prints the stages of a miss, a hit and a prefetch, runs the language model on the
rows, and compares its tokens with those of the full model on the pixels. Writes a picture of every image with
its patch grid and its rows as colours. The weights are random, so the tokens have no meaning.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from encoder_service.towers.synthetic import make_checkpoint  # noqa: E402
from lm_adapter import EncodedRows, ImageItem, PrefetchStatus, VisionEncoderClient  # noqa: E402
from lm_adapter.engines.hf import RemoteItem, import_transformers, load_language_model  # noqa: E402

PHOTOS = ROOT / "tests" / "data" / "photos"
STAGES = ("identify_ms", "admit_ms", "decode_ms", "resize_ms", "queue_ms", "tower_ms", "store_ms", "total_ms")
NEW_TOKENS = 12
MAX_LOGIT_ERROR = 2e-5
console = Console(width=140)


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
    with running_service(checkpoint) as target, VisionEncoderClient(target, timeout_s=120) as client:
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
    summary.add_row("same tokens", "[green]yes[/green]" if same else "[red]NO[/red]")
    summary.add_row("picture", str(written))
    summary.add_row("took", f"{time.monotonic() - started:.1f} s")
    console.print(summary)
    return 0 if same else 1


@contextmanager
def running_service(checkpoint: Path) -> Iterator[str]:
    """Runs the service as a separate process on free ports. Yields its address."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VE_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]),
    }
    options = ["--device", "cpu", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "encoder_service", "serve", "--model", str(checkpoint), *options]
    command += ["--log-level", "warning"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" at (\S+)", line)
        if found is None:
            raise SystemExit("the service did not start; its reason is above")
        console.print(f"service: process {process.pid}, {line.strip()}")
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


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


def draw(photos: list[EncodedPhoto], path: Path, height: int = 320) -> Path:
    """Draws one line per photograph: the image with its patch grid, then its rows: main level and deepstack
    levels, with the three largest principal components of each level as red, green and blue."""
    from PIL import ImageOps

    gap, label = 12, 22
    panels: list[list[tuple[str, Image.Image]]] = []
    for one in photos:
        _, h, w = one.rows.grid_thw
        photo = ImageOps.exif_transpose(Image.open(io.BytesIO(one.data))).convert("RGB")
        size = (round(height * w / h), height)
        line = [(f"{one.path.name}, {w} x {h} patches of 16 pixels", with_grid(photo.resize(size), h, w))]
        levels = ["main", *(f"deepstack {level}" for level in range(one.rows.num_deepstack_levels))]
        values = one.rows.numpy().reshape(h // 2, w // 2, len(levels), -1)
        for level, name in enumerate(levels):
            colours = principal_colours(values[:, :, level])
            line.append((f"{name}: {h // 2 * w // 2} rows", colours.resize(size, Image.Resampling.NEAREST)))
        panels.append(line)
    width = max(sum(image.width + gap for _, image in line) for line in panels) + gap
    sheet = Image.new("RGB", (width, len(panels) * (height + label + gap) + gap), "white")
    pen = ImageDraw.Draw(sheet)
    y = gap
    for line in panels:
        x = gap
        for text, image in line:
            pen.text((x, y), text, fill="black")
            sheet.paste(image, (x, y + label))
            x += image.width + gap
        y += height + label + gap
    sheet.save(path)
    return path


def with_grid(image: Image.Image, h: int, w: int) -> Image.Image:
    """The image with lines around h x w patches, and thick lines around visual tokens (2 x 2 patches)."""
    pen = ImageDraw.Draw(image, "RGBA")
    for row in range(h + 1):
        y = row * (image.height - 1) / h
        pen.line([(0, y), (image.width, y)], fill=(255, 255, 255, 150 if row % 2 == 0 else 50))
    for column in range(w + 1):
        x = column * (image.width - 1) / w
        pen.line([(x, 0), (x, image.height)], fill=(255, 255, 255, 150 if column % 2 == 0 else 50))
    return image


def principal_colours(rows_HWD: np.ndarray[Any, Any]) -> Image.Image:
    """The three largest principal components of rows [H, W, D] as an H x W picture."""
    height, width, _ = rows_HWD.shape
    centred = rows_HWD.reshape(height * width, -1) - rows_HWD.mean((0, 1))
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    colours = centred @ directions[:3].T
    low, high = np.percentile(colours, (1, 99), axis=0)
    scaled = np.clip((colours - low) / np.maximum(high - low, 1e-9), 0, 1)
    return Image.fromarray((scaled * 255).astype(np.uint8).reshape(height, width, 3))


def grid_text(rows: EncodedRows) -> str:
    return "x".join(str(side) for side in rows.grid_thw)


if __name__ == "__main__":
    raise SystemExit(main())
