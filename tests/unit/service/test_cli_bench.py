"""``vision-encoder bench``: what it sends, and that its figures are those of the callers."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from encoder_service.cli import app
from encoder_service.cli.bench_images import Contents, generated, parse_sizes, png_file, with_comment
from encoder_service.cli.bench_load import Extent, Load, figures, percentiles
from lm_adapter import CacheTier, Grid, ItemFailed, StageTimings
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder

PHOTO = (Path(__file__).parents[2] / "data" / "photos" / "coffee.jpg").read_bytes()


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as found:
        yield found


def bench(fake: FakeEncoder, *arguments: object) -> Result:
    given = ["bench", "--server", fake.target, "--sizes", "64x48,32x32", *map(str, arguments)]
    return CliRunner().invoke(app, given, catch_exceptions=False)


def sent(fake: FakeEncoder) -> list[bytes]:
    return [item.encoded for call in fake.calls if call.method == "Encode" for item in call.request.items]


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_images_have_their_sizes_and_are_new_content_each(fake: FakeEncoder) -> None:
    done = bench(fake, "--num-images", 40, "--warm-up", 4, "--concurrency", 3, "--json")
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert (result["num_images"], result["num_failed"], result["tiers"]) == (40, 0, {"miss": 40})
    assert result["latency_ms"]["p50"] <= result["latency_ms"]["p99"] <= result["latency_ms"]["max"]
    files = sent(fake)
    assert len(set(files)) == len(files) == 44
    sizes = Counter(Image.open(io.BytesIO(data)).size for data in files)
    assert sizes.keys() == {(64, 48), (32, 32)}
    assert max(sizes.values()) <= 23


def test_repeats_are_contents_sent_before(fake: FakeEncoder) -> None:
    result = json.loads(bench(fake, "--num-images", 200, "--repeats", 0.5, "--json").stdout)
    assert 0.3 < result["hit_share"] + result["tiers"].get("in_flight", 0) / 200 < 0.7
    assert 60 < len(set(sent(fake))) < 156


def test_files_of_a_folder_are_sent_and_failures_are_counted(fake: FakeEncoder, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    (tmp_path / "broken.webp").write_bytes(b"RIFF")
    fake.script.failures[content_digest(b"RIFF")] = ItemFailed("broken", reason="UNDECODABLE_IMAGE")
    done = bench(fake, "--files", tmp_path, "--num-images", 10, "--warm-up", 0, "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (result["files"], result["failures"]) == (2, {"UNDECODABLE_IMAGE": 5})
    assert sum(PHOTO[-1000:] in data for data in sent(fake)) == 5
    assert "none.jpg" in bench(fake, "--files", tmp_path / "none.jpg").stderr


def test_the_tables_have_the_stages(fake: FakeEncoder) -> None:
    shown = bench(fake, "--duration", 0.3, "--repeats", 0.2).stdout
    for text in ("16 at a time", "images a second", "20% repeats", "p99", "latency", "tower", "outside"):
        assert text in shown


def test_a_server_that_is_away_or_a_wrong_size_is_one_line(fake: FakeEncoder) -> None:
    wrong = bench(fake, "--sizes", "64")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (1, 1)
    assert "'64' is no size, needs WIDTHxHEIGHT" in wrong.stderr
    fake.stop()
    away = bench(fake, "--num-images", 1)
    assert (away.exit_code, away.stderr.count("\n")) == (1, 1)


def test_a_comment_changes_the_content_and_no_pixel() -> None:
    png = png_file(pixels(PHOTO))
    np.testing.assert_array_equal(pixels(png), pixels(PHOTO))
    for data in (PHOTO, png, generated([(30, 50)], as_png=False)[0]):
        changed = with_comment(data, b"run-1")
        assert content_digest(changed) != content_digest(data)
        np.testing.assert_array_equal(pixels(changed), pixels(data))
    assert parse_sizes("448x448, 1024x768") == [(448, 448), (1024, 768)]


class BusyClient:
    """Takes one image at a time, and this process with it."""

    BUSY_S = 0.03

    async def encode_one(self, _item: object) -> object:
        time.sleep(self.BUSY_S)  # noqa: ASYNC251
        return SimpleNamespace(
            timings=StageTimings(), tier=CacheTier.MISS, grid_thw=Grid(1, 2, 2), num_bytes=8
        )


def test_latency_in_an_open_loop_counts_from_when_an_image_was_due() -> None:
    """Twenty images are due within about 20 ms, and each takes 30 ms: the last one has waited."""

    async def run() -> Load:
        load = Load(BusyClient(), Contents([PHOTO], 0.0), Extent(10.0, 20))  # type: ignore[arg-type]
        await load.open(1000.0)
        return load

    samples = asyncio.run(run()).samples
    assert len(samples) == 20
    result = figures(samples, 1.0, 10.0)
    assert result["latency_ms"]["max"] > 15 * BusyClient.BUSY_S * 1e3
    assert result["late_ms"]["max"] > 10 * BusyClient.BUSY_S * 1e3


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([3.0, 1.0, 2.0, 4.0]) == {"p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0}
    assert percentiles([]) is None
