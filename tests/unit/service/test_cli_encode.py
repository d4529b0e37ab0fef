"""``vision-encoder encode``: one bad file or name costs no other file's rows, and no name is interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner, Result

from encoder_service.cli import app
from encoder_service.cli.encode import begins_as_clip
from encoder_service.cli.output import plain
from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.errors import ItemFailed
from lm_adapter.items import Modality
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, Fault
from tests.unit.ingest import clip_files, image_files

# As the system gives them, with surrogates for bytes that are no text.
NAMES = [
    os.fsdecode(name)
    for name in (
        b"caf\xe9.png", b"\xff\xfe", b" ", b"-", b"[red]x.png", b"[word].png", b"[", b"[#fff on red]",
        b"a\\[b]", b":smile:.png", b"line\nbreak.png", b"\x1b[31mred\x1b[0m.png", b"\x07\x9b2J",
        "\u202egnp.exe".encode(), "naïve 图.png".encode(), b"%s{0}.png", b"x" * 255,
    )
]  # fmt: skip


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as found:
        yield found


def encode(fake: FakeEncoder, *arguments: object, columns: int = 2000) -> Result:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    given = ["encode", "--server", fake.target, *map(str, arguments)]
    return runner.invoke(app, given, catch_exceptions=False)


def written(folder: Path, *names: str) -> list[Path]:
    """Files of different content, one of each name."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(path))
    return paths


def rows_of(out: Path) -> list[int]:
    """Of which items there are rows."""
    with safe_open(out, "pt") as rows:
        return sorted(int(key.partition(".")[2]) for key in rows.keys() if key.startswith("rows."))  # noqa: SIM118


def is_shown_as_it_is(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_rows_are_written_in_input_order_with_what_names_them(fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, "a.png", "b.png", "c.png"), tmp_path / "rows"
    assert encode(fake, *paths, "--out", out).exit_code == 0
    with VisionEncoderClient(fake.target, timeout_s=30) as client:
        expected = [client.encode_one(ImageItem(path.read_bytes())) for path in paths]
    with safe_open(out, "pt") as found:
        metadata = found.metadata()
        for index, rows in enumerate(expected):
            assert torch.equal(found.get_tensor(f"rows.{index}"), rows.torch())
            assert found.get_tensor(f"grid_thw.{index}").tolist() == list(rows.grid_thw)
            assert metadata[f"key.{index}"] == rows.key.hex()
            assert metadata[f"content_digest.{index}"] == content_digest(paths[index].read_bytes()).hex()
        assert metadata["dtype"] == expected[0].dtype
        assert metadata["num_deepstack_levels"] == str(expected[0].num_deepstack_levels)


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a.png")
    arguments = ["make-checkpoint", str(path / "checkpoint"), "--family", "qwen3_vl"]
    failed = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"vision-encoder: cannot write {path / 'checkpoint'}: ")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_are_neither_interpreted_nor_in_the_way(name: str, fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, "before.png", name, "after.png"), tmp_path / "rows"
    for of_item in (None, ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3)):
        if of_item is not None:
            fake.script.failures[content_digest(paths[1].read_bytes())] = of_item
        done = encode(fake, *paths, "--out", out)
        assert (done.exit_code, rows_of(out)) == ((0, [0, 1, 2]) if of_item is None else (1, [0, 2]))
        assert f"│ {plain(name)} " in done.stdout
        assert is_shown_as_it_is(done.stdout + done.stderr)
        if of_item is None:
            with safe_open(out, "pt") as rows:
                assert rows.metadata()["image.1"].encode() == name.encode("utf-8", "backslashreplace")
        else:
            assert f"{plain(str(paths[1]))}: UNDECODABLE_IMAGE: no image\n" in done.stderr
            assert done.stderr.endswith("1 of 3 images failed: 1 UNDECODABLE_IMAGE\n")


def test_a_run_without_rows_shows_its_failures_alone(fake: FakeEncoder, tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a.png")
    fake.script.failures[content_digest(path.read_bytes())] = ItemFailed("no image", reason="BAD", status=3)
    done = encode(fake, path)
    failure = f"vision-encoder: {path}: BAD: no image\nvision-encoder: 1 of 1 images failed: 1 BAD\n"
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", failure)


def test_names_on_a_terminal_that_knows_ascii_alone(fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, *NAMES), tmp_path / "rows"
    done = subprocess.run(
        [sys.executable, "-m", "encoder_service", "encode", "--server", fake.target, *paths, "--out", out],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "500"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rows_of(out) == list(range(len(NAMES)))
    assert done.stdout.decode("ascii").count(" miss ") == len(NAMES)


def test_the_rows_file_may_have_any_name(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, "a.png")
    for name in NAMES:
        out = tmp_path / "out" / name
        num_calls = fake.num_calls["Encode"]
        failed = encode(fake, *paths, "--out", out)
        assert failed.exit_code == 1
        assert f"cannot write {plain(str(out))}: " in failed.stderr
        assert fake.num_calls["Encode"] == num_calls  # before anything is encoded
        out.parent.mkdir()
        assert encode(fake, *paths, "--out", out).exit_code == 0
        assert rows_of(out.rename(tmp_path / "rows")) == [0]
        out.parent.rmdir()


def test_files_that_cannot_be_read_fail_alone(fake: FakeEncoder, tmp_path: Path) -> None:
    first, last = written(tmp_path, "first.png", "last.png")
    folder, missing, loop, out = (tmp_path / name for name in ("folder.png", "missing.png", "loop", "rows"))
    folder.mkdir()  # empty
    loop.symlink_to(loop)
    done = encode(fake, first, folder, missing, loop, last, "--out", out)
    assert done.exit_code == 1
    assert rows_of(out) == [0, 4]
    for path, text in (
        (folder, "the folder has no image"),
        (missing, "No such file"),
        (loop, "Too many levels"),
    ):
        assert f"{path}: UNREADABLE: {text}" in done.stderr
    assert "3 of 5 images failed: 3 UNREADABLE" in done.stderr
    with safe_open(out, "pt") as rows:
        assert rows.metadata()["image.4"] == "last.png"
        assert rows.metadata()["num_items"] == "5"

    none = encode(fake, folder, missing, "--out", tmp_path / "none")
    assert none.exit_code == 1
    assert "2 of 2 images failed" in none.stderr
    assert not (tmp_path / "none").exists()


def test_files_of_the_same_name_are_shown_by_their_paths(fake: FakeEncoder, tmp_path: Path) -> None:
    """Of which "[/red]" would end a style."""
    paths, out = written(tmp_path, "[red]/x.png", "[/red]/x.png", "a/y.png"), tmp_path / "rows"
    done = encode(fake, *paths, paths[0], "--out", out)
    assert done.exit_code == 0
    assert rows_of(out) == [0, 1, 2, 3]
    assert [done.stdout.count(f" {path} ") for path in paths] == [2, 1, 0]
    assert "│ y.png " in done.stdout


@pytest.mark.parametrize("fault", [Fault.ABORT, Fault.MISSING_ITEM])
def test_rows_that_came_before_a_call_failed_are_kept(
    fault: Fault, fake: FakeEncoder, tmp_path: Path
) -> None:
    paths, out = written(tmp_path, "a.png", "b.png", "c.png"), tmp_path / "rows"
    fake.script.faults[content_digest(paths[2].read_bytes())] = fault
    done = encode(fake, *paths, "--out", out)
    assert done.exit_code == 1
    assert rows_of(out) == [0, 1]
    assert f"{paths[2]}: " in done.stderr
    assert "1 of 3 images failed" in done.stderr


def test_words_of_a_server_are_not_interpreted(fake: FakeEncoder, tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a.png")
    words = "[bold]no[/bold]\n\x1b[2J"
    fake.script.failures[content_digest(path.read_bytes())] = ItemFailed(words, reason="X", status=3)
    done = encode(fake, path)
    assert f"{path}: X: [bold]no[/bold]\\n\\x1b[2J" in done.stderr
    assert is_shown_as_it_is(done.stderr)


def test_names_of_a_server_and_a_namespace_are_not_interpreted(fake: FakeEncoder) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["info", "--server", fake.target, "--namespace", "[red]tenant[/red]"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "'[red]tenant[/red]' is open to this caller" in done.stdout


def test_p58_what_is_a_clip_follows_from_the_bytes(fake: FakeEncoder, tmp_path: Path) -> None:
    pictures = image_files.every_file()
    assert not any(map(begins_as_clip, pictures.values()))
    frames = clip_files.moving(4, 32, 32)
    for kind in ("h264.mp4", "mpeg4.mp4", "vp9.webm", "h264.mkv"):
        assert begins_as_clip(clip_files.encode(frames, kind, fps=4))
    clip, picture = tmp_path / "clip.png", tmp_path / "picture.mp4"
    clip.write_bytes(clip_files.encode(frames, "h264.mp4", fps=4))
    picture.write_bytes(next(iter(pictures.values())))
    assert encode(fake, clip, picture).exit_code == 0
    items = [item for record in fake.calls if record.method == "Encode" for item in record.request.items]
    sent = {item.encoded: item.modality for item in items}
    assert sent == {clip.read_bytes(): 2, picture.read_bytes(): 1}, Modality
