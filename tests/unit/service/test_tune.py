"""``tune``: traffic read strictly, a proposal that beats the default on its own traffic, both shown."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from encoder_service.cli import app
from encoder_service.config import parse_settings
from encoder_service.errors import AspectRatioExceeded, ConfigurationError
from encoder_service.scheduler.buckets import default_ladder
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.tune import read_traffic, tune
from encoder_service.types import Grid

MAX_SIDE = 4000


def target_grid(height: int, width: int) -> Grid:
    """Sides rounded to 32 pixels at 16 pixels a patch, as the Qwen families do within their limits."""
    if max(height, width) > MAX_SIDE:
        raise AspectRatioExceeded(f"side of {max(height, width)}, at most {MAX_SIDE}")
    return Grid(1, max(2, round(height / 32) * 2), max(2, round(width / 32) * 2))


def write_traffic(path: Path, num_rows: int, seed: int) -> Path:
    """An example: documents of few sizes, photographs of many, screenshots."""
    generator = random.Random(seed)
    lines = ["width,height,count"]
    for _ in range(num_rows):
        kind = generator.random()
        if kind < 0.3:
            width, height = generator.choice([(1240, 1754), (1654, 2339)])
        elif kind < 0.5:
            width, height = generator.choice([(1920, 1080), (2560, 1440)])
        else:
            width, height = generator.randint(200, 1600), generator.randint(200, 1600)
        lines.append(f"{width},{height},{generator.randint(1, 5)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_proposal_is_no_worse_than_the_default_and_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    path = write_traffic(tmp_path / "sizes.csv", 200, 1)
    report = tune(
        path,
        target_grid,
        max_patches=16384,
        max_items=64,
        console=Console(file=out, width=120, color_system=None),
    )
    assert report.default.ladder.buckets == default_ladder(16384).buckets
    assert report.proposed.waste.padded_us <= report.default.waste.padded_us
    assert report.proposed.waste.share < report.default.waste.share < 0.12
    assert len(report.proposed.ladder.sizes) <= len(report.default.ladder.sizes)
    assert set(report.alternatives) == {8, 16, 32}
    assert report.alternatives[8].padded_us >= report.alternatives[16].padded_us
    text = out.getvalue()
    assert f"{report.default.waste.share:.2%}" in text
    assert f"{report.proposed.waste.share:.2%}" in text
    assert ",".join(map(str, report.proposed.ladder.sizes)) in text
    assert f"{report.num_images:g} images" in text


def test_sizes_land_on_the_traffic(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("width,height,count\n448,448,90\n1024,1024,10\n")
    report = tune(path, target_grid, max_patches=8192, max_items=1, num_sizes=3)
    assert report.proposed.ladder.sizes == (784, 4096, 8192)
    # What is left are the sequence slots that are not used.
    assert report.proposed.waste.share < 0.005


def test_oversized_and_refused_images_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("height,width,count\n448,448,7\n3200,3200,2\n5000,100,4\n")
    out = io.StringIO()
    report = tune(path, target_grid, max_patches=4096, max_items=8, console=Console(file=out, width=120))
    assert (report.num_images, report.oversized, report.refused) == (13, 2, 4)
    assert report.proposed.waste.eager_launches > 0
    assert "2 images are above" in out.getvalue()
    assert "4 are refused" in out.getvalue()


def test_traffic_needs_no_count_and_adds_equal_sizes_up(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("\ufeffWidth, Height\n448,320\n448,320\n64,64\n", encoding="utf-8")
    assert read_traffic(path).counts == {(320, 448): 2, (64, 64): 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns are [], needs width, height"),
        ("width,count\n1,1\n", "columns are ['width', 'count'], needs height"),
        ("width,height\n", "0 images, needs at least 1"),
        ("width,height\n448,448\n448,x\n", "line 3: height is 'x', needs a positive integer"),
        ("width,height\n448\n", "line 2: height is None, needs a positive integer"),
        ("width,height,count\n448,448,0\n", "line 2: count is '0', needs a positive integer"),
        ("width,height\n5000,5000\n", "1 images, the model's preprocessing takes 0 of them"),
    ],
)
def test_wrong_traffic_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        tune(path, target_grid, max_patches=4096, max_items=8)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read as CSV"):
        read_traffic(tmp_path / "none.csv")


def test_the_command_prints_sizes_that_serve_takes(tmp_path: Path) -> None:
    checkpoint, traffic = tmp_path / "checkpoint", tmp_path / "sizes.csv"
    make_checkpoint(checkpoint, "kimi_k25", "tiny", 1)
    traffic.write_text("width,height,count\n448,448,50\n1024,768,10\n")
    options = ["--traffic", str(traffic), "--model", str(checkpoint), "--num-sizes", "6"]
    ended = CliRunner().invoke(app, ["tune", *options, "--max-patches", "8192"])
    assert ended.exit_code == 0, ended.output
    found = re.search(r"proposed sizes in patches: ([\d,]+)", ended.output)
    assert found
    sizes = parse_settings(model=checkpoint, bucket_sizes=found[1]).bucket_sizes
    assert len(sizes) == 6
    assert max(sizes) == 8192
    traffic.write_text("width,height\n1,nonsense\n")
    assert CliRunner().invoke(app, ["tune", *options]).exit_code == 1
