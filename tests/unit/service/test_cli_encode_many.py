"""``vision-encoder encode`` of many items: what it takes, what a broken run keeps, what --resume skips."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from bench.harness.waiting import wait_until
from encoder_service.cli import app
from encoder_service.cli.inputs import listed
from encoder_service.cli.rows_files import Entry, GrowingFile, read_header
from encoder_service.cli.rows_output import recorded_items
from lm_adapter import EncodedRows, Grid
from lm_adapter.errors import ItemFailed
from lm_adapter.keys import content_digest
from lm_adapter.testing import FakeEncoder, Fault, fake_model, fake_rows

SLOW_S = 0.02
ROOT = Path(__file__).parents[3]


@pytest.fixture
def fake() -> Iterator[FakeEncoder]:
    with FakeEncoder() as found:
        yield found


def encode(fake: FakeEncoder, *arguments: object, stdin: bytes | None = None) -> Result:
    runner = CliRunner(env={"COLUMNS": "500"})
    given = ["encode", "--server", fake.target, *map(str, arguments)]
    return runner.invoke(app, given, input=stdin, catch_exceptions=False)


def written(folder: Path, *names: str) -> list[Path]:
    """Files whose content is their path."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(path))
    return paths


def sent(fake: FakeEncoder) -> int:
    """Items that were sent to be encoded."""
    return sum(len(call.request.items) for call in fake.calls if call.method == "Encode")


def paths_of(out: Path) -> list[str]:
    """Of which items there are rows, in the order of their numbers. Their rows are the right ones."""
    with safe_open(out, "np") as rows:
        metadata = rows.metadata()
        indices = sorted(int(name.partition(".")[2]) for name in metadata if name.startswith("key."))
        for index in indices:
            digest = bytes.fromhex(metadata[f"content_digest.{index}"])
            found = rows.get_tensor(f"rows.{index}")
            np.testing.assert_array_equal(found, fake_rows(digest, *found.shape))
        assert len(rows.keys()) == 2 * len(indices)
    return [metadata[f"path.{index}"] for index in indices]


# What it takes


def test_a_folder_is_taken_with_its_folders_and_what_is_left_out_is_named(
    fake: FakeEncoder, tmp_path: Path
) -> None:
    names = (
        "b.PNG",
        "a/2.jpeg",
        "a/deep/1.webp",
        "c.mp4",
        ".hidden.png",
        ".git/x.png",
        "notes.txt",
        "a/none",
    )
    paths, out = written(tmp_path / "photos", *names), tmp_path / "rows"
    done = encode(fake, tmp_path / "photos", "--out", out)
    assert done.exit_code == 0
    assert set(paths_of(out)) == {str(path) for path in paths[:4]}
    for text in ("2 hidden: ", ".git", ".hidden.png", "2 without the suffix", "notes.txt", "a/no"):
        assert text in done.stderr


def test_a_folder_that_cannot_be_read_fails_by_name(
    fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "photos/a.png", "photos/closed/b.png")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    done = encode(fake, tmp_path / "photos", "--out", tmp_path / "rows")
    assert done.exit_code == 1
    assert f"{tmp_path}/photos/closed: UNREADABLE: cannot be read: Permission denied" in done.stderr
    assert paths_of(tmp_path / "rows") == [f"{tmp_path}/photos/a.png"]


def test_patterns_are_expanded_here_unless_a_file_has_that_name(fake: FakeEncoder, tmp_path: Path) -> None:
    written(tmp_path, "1.png", "x/2.png", "x/y/3.png", "[ab].png", "a.png")
    out = tmp_path / "rows"
    assert encode(fake, tmp_path / "**" / "[0-9].png", tmp_path / "[ab].png", "--out", out).exit_code == 0
    assert [os.path.relpath(path, tmp_path) for path in paths_of(out)] == [
        "1.png", "x/2.png", "x/y/3.png", "[ab].png"
    ]  # fmt: skip
    done = encode(fake, tmp_path / "*.gif")
    assert done.exit_code == 1
    assert "*.gif: UNREADABLE: no file matches the pattern" in done.stderr


def test_a_list_on_standard_input_has_any_names(fake: FakeEncoder, tmp_path: Path) -> None:
    names = [os.fsdecode(name) for name in (b"a b.png", b"caf\xe9.png", b"line\nbreak.png", b"*.png")]
    paths, out = written(tmp_path, *names), tmp_path / "rows"
    data = b"".join(os.fsencode(path) + b"\0" for path in paths)
    assert encode(fake, "-", "--out", out, stdin=data).exit_code == 0
    assert paths_of(out) == [str(path).encode("utf-8", "backslashreplace").decode() for path in paths]
    assert list(listed(b"a b.png\n\nhttp://x/y?z\r\n")) == ["a b.png", "http://x/y?z"]
    empty = encode(fake, "-", stdin=b"\n")
    assert (empty.exit_code, "the list is empty" in empty.stderr) == (1, True)


def test_urls_are_sent_as_urls(fake: FakeEncoder) -> None:
    encode(fake, "https://example.com/a.jpg?size=2", "http://example.com/b.mp4")
    items = [item for call in fake.calls if call.method == "Encode" for item in call.request.items]
    assert {(item.url, item.modality) for item in items} == {
        ("https://example.com/a.jpg?size=2", 1),
        ("http://example.com/b.mp4", 2),
    }


def test_through_a_gateway_each_item_has_its_route(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, "a.png", "b.png")
    assert encode(fake, *paths, "--fleet").exit_code == 0
    routes = {call.metadata["x-content-digest"] for call in fake.calls if call.method == "Encode"}
    assert routes == {content_digest(path.read_bytes()).hex() for path in paths}


# What it writes


def test_files_per_item_keep_folders_apart_and_have_ordinary_permissions(
    fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a/x.png", "b/x.png", os.fsdecode(b"caf\xe9\n.png"), "y" * 255, "c/" + "y" * 255]
    monkeypatch.chdir(tmp_path)
    written(Path(), *names)
    assert encode(fake, *names, "../" + tmp_path.name + "/a/x.png", "--out-dir", "rows").exit_code == 0
    found = sorted(path for path in Path("rows").rglob("*") if path.is_file())
    assert len(found) == 6
    assert {Path("rows/a/x.png.safetensors"), Path("rows/b/x.png.safetensors")} < set(found)
    assert Path("rows", "__", tmp_path.name, "a", "x.png.safetensors") in found
    umask = os.umask(0o022)
    os.umask(umask)
    for path in found:
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        (name,) = paths_of(path.rename("any.safetensors"))
        assert name
    for out in ("one.safetensors", "shards.safetensors"):
        encode(fake, *names, "--out", out, *(["--shard-size", "1MB"] if out.startswith("shards") else []))
    assert {path.stat().st_mode & 0o777 for path in Path().glob("*.safetensors*")} == {0o666 & ~umask}


def test_two_names_never_share_a_file(
    fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = written(tmp_path, "x.png")
    inside = Path(str(tmp_path).lstrip("/"), "x.png")
    written(Path(), str(inside))
    done = encode(fake, path, inside, "--out-dir", "rows")
    assert done.exit_code == 1
    assert f"{path} and {inside} would have one file below rows" in done.stderr
    assert encode(fake, "x.png", "./x.png", "--out-dir", "rows").exit_code == 0
    written(Path(), "a", "a.safetensors/x/b.png")
    done = encode(fake, "a.safetensors/x/b.png", "a", "--out-dir", "none")
    assert (done.exit_code, Path("none").exists()) == (1, False)
    assert "the file of a would be the folder of a.safetensors/x/b.png below none: use --out" in done.stderr


def test_shards_and_their_index_have_everything_once(fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, *(f"{number}.png" for number in range(20))), tmp_path / "rows.safetensors"
    done = encode(fake, *paths, "--out", out, "--shard-size", "20kB")
    assert (done.exit_code, out.exists()) == (0, False)
    shards = sorted(tmp_path.glob("rows-*"))
    assert f"; rows in {shards[0]} to {shards[-1]}, index {out}.index.json\n" in done.stdout
    assert len(shards) > 1  # sizes differ with the content, which is the path
    index = json.loads((tmp_path / "rows.safetensors.index.json").read_text())
    assert sorted(path for shard in shards for path in paths_of(shard)) == sorted(map(str, paths))
    tensors = {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == tensors
    assert len(tensors) == 40

    more = written(tmp_path, "more.png")
    assert "--resume continues" in encode(fake, *paths, "--out", out, "--shard-size", "20kB").stderr
    num_sent = sent(fake)
    done = encode(fake, *paths, *more, "--out", out, "--shard-size", "20kB", "--resume")
    assert (done.exit_code, sent(fake) - num_sent) == (0, 1)
    assert "20 were there" in done.stdout
    index = json.loads((tmp_path / "rows.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 42


def test_what_the_run_and_its_items_did_is_json(fake: FakeEncoder, tmp_path: Path) -> None:
    good, bad = written(tmp_path, "good.png", "bad.png")
    fake.script.failures[content_digest(bad.read_bytes())] = ItemFailed("broken", reason="UNDECODABLE_IMAGE")
    out = tmp_path / "rows"
    done = encode(fake, good, bad, tmp_path / "none", "--out", out, "--json")
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["index"])
    assert [line["path"] for line in lines] == [str(good), str(bad), str(tmp_path / "none")]
    assert (lines[0]["key"], lines[0]["file"], lines[0]["file_index"]) == (
        load_header(out)["key.0"], str(out), 0
    )  # fmt: skip
    assert lines[0]["timings"].keys() >= {"decode_ms", "tower_ms", "total_ms"}
    assert [line["error"]["reason"] for line in lines[1:]] == ["UNDECODABLE_IMAGE", "UNREADABLE"]
    assert "2 of 3 images failed: " in done.stderr
    fake.stop()
    away = encode(fake, good, "--json")
    assert json.loads(away.stdout)["error"]["reason"] == "UNAVAILABLE"


def load_header(out: Path) -> dict[str, str]:
    with safe_open(out, "np") as rows:
        metadata: dict[str, str] = rows.metadata()
    return metadata


# What breaks a run


def test_a_killed_run_keeps_its_rows_and_is_resumed(fake: FakeEncoder, tmp_path: Path) -> None:
    written(tmp_path, *(f"photos/{number:03}.png" for number in range(300)))
    out, partial = tmp_path / "rows.safetensors", tmp_path / "rows.safetensors.partial"
    fake.script.latency_s = SLOW_S
    arguments = ["--server", fake.target, "--concurrency", "4", str(tmp_path / "photos"), "--out", str(out)]
    command = [sys.executable, "-m", "encoder_service", "encode", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_until(lambda: sent(fake) > 40, "items are sent", 60)
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    # What the kill cut off is dropped; the library may refuse the file for it.
    kept = recorded_items(read_header(partial))
    assert 30 < len(kept) < 300
    fake.script.latency_s = 0.0
    num_sent = sent(fake)
    done = encode(fake, tmp_path / "photos", "--out", out, "--resume")
    assert done.exit_code == 0
    assert f"{len(kept)} were there" in done.stdout
    assert sent(fake) - num_sent == 300 - len(kept)
    assert paths_of(out) == [f"{tmp_path}/photos/{number:03}.png" for number in range(300)]
    assert not partial.exists()


def rows_like(number: int) -> EncodedRows:
    digest = bytes([number]) * 32
    payload = fake_rows(digest, 2, 8).reshape(-1).view(np.uint8)
    return EncodedRows(digest, digest, Grid(1, 2, 4), 2, 8, "float32", 1, payload)


def append(path: Path, names: Sequence[str], first: int, *, resumes: bool) -> None:
    file = GrowingFile(path, names, 5, resumes=resumes)
    for index, name in enumerate(names, first):
        file.append(Entry(index, name, rows_like(index)))
    file.close()


@pytest.mark.parametrize("written_last", ["grid_thw.2", "key.2"])
def test_a_file_that_was_cut_anywhere_keeps_the_items_before(written_last: str, tmp_path: Path) -> None:
    """A kill may leave any part of the last line that was written; the tensors' line comes last."""
    path = tmp_path / "rows"
    append(path, ["0", "1", "2"], 0, resumes=False)
    whole = path.read_bytes()

    def line_of(name: str) -> slice:
        begin = whole.index(f',"{name}"'.encode())
        return slice(begin, whole.index(b"\n", begin) + 1)

    for cut in range(line_of(written_last).start, line_of(written_last).stop - 1, 3):
        data = bytearray(whole)
        for line in (line_of("grid_thw.2"), line_of(written_last)):
            data[line] = b" " * (line.stop - line.start)
        begin = line_of(written_last).start
        data[begin:cut] = whole[begin:cut]
        path.write_bytes(data)
        assert read_header(path).indices == [0, 1], cut
        append(path, ["2", "3", "4"], 2, resumes=True)
        assert paths_of(path) == ["0", "1", "2", "3", "4"]


def test_rows_of_older_files_are_kept(
    tmp_path: Path, fake: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by the library, with names alone."""
    from safetensors.numpy import save_file

    path, new = written(tmp_path, "a.png", "b.png")
    out = tmp_path / "rows"
    encode(fake, path, "--out", tmp_path / "now")
    metadata = {name: text for name, text in load_header(tmp_path / "now").items() if name != "path.0"}
    save_file(load_file(tmp_path / "now"), out, metadata)
    monkeypatch.chdir(tmp_path)
    num_sent = sent(fake)
    assert encode(fake, "a.png", "b.png", "--out", out, "--resume").exit_code == 0
    assert sent(fake) - num_sent == 1
    assert load_file(out).keys() == {"rows.0", "grid_thw.0", "rows.1", "grid_thw.1"}
    assert new.exists()


def test_a_full_disk_ends_the_run_and_keeps_what_fits(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, *(f"{number}.png" for number in range(60)))
    out, partial = tmp_path / "rows.safetensors", tmp_path / "rows.safetensors.partial"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))  # Python gets EFBIG
    try:
        done = encode(fake, *paths, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 1
    assert "rows cannot be written: File too large" in done.stderr
    assert "--resume continues" in done.stderr
    kept = paths_of(partial)
    assert 0 < len(kept) < 60
    assert encode(fake, *paths, "--out", out, "--resume").exit_code == 0
    assert len(paths_of(out)) == 60


def stopping(fake: FakeEncoder, num_items: int) -> threading.Thread:
    """Stops the server once it got so many items."""

    def stop() -> None:
        wait_until(lambda: sent(fake) >= num_items, "items are sent", 60)
        fake.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_a_server_that_is_gone_ends_the_run(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, *(f"{number}.png" for number in range(100)))
    out, partial = tmp_path / "rows.safetensors", tmp_path / "rows.safetensors.partial"
    fake.script.latency_s = SLOW_S
    thread = stopping(fake, 20)
    done = encode(fake, *paths, "--out", out, "--concurrency", 4, "--timeout-s", 1)
    thread.join()
    assert done.exit_code == 1
    assert "waiting up to 1 s for the server" in done.stderr
    assert "was not ready within 1.0 s" in done.stderr
    assert "of 100 images; --resume continues" in done.stderr
    assert len(paths_of(partial)) > 10


def test_a_server_that_restarts_is_waited_for(fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, *(f"{number}.png" for number in range(30))), tmp_path / "rows"
    leaving = ItemFailed("the service is shutting down", reason="DRAINING", status=14)
    fake.script.call_failures["Encode"] = (grpc.StatusCode.UNAVAILABLE, leaving)
    fake.script.serving = False

    def come_back() -> None:
        wait_until(lambda: fake.num_calls["GetServerInfo"] > 3, "the run waits", 60)
        fake.script.call_failures.clear()
        fake.script.serving = True

    thread = threading.Thread(target=come_back)
    thread.start()
    done = encode(fake, *paths, "--out", out, "--concurrency", 4)
    thread.join()
    assert done.exit_code == 0, done.stderr
    assert "shutting down; waiting up to 60 s for the server" in done.stderr
    assert len(paths_of(out)) == 30


def test_a_refused_caller_ends_the_run_at_once(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, *(f"{number}.png" for number in range(50)))
    refusal = ItemFailed("no", reason="PERMISSION_DENIED", status=7)
    fake.script.call_failures["Encode"] = (grpc.StatusCode.PERMISSION_DENIED, refusal)
    done = encode(fake, *paths, "--out", tmp_path / "rows", "--concurrency", 4)
    assert done.exit_code == 1
    assert sent(fake) <= 4
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.glob("rows*")) == []


def test_overload_is_waited_out_and_a_deadline_is_one_items(fake: FakeEncoder, tmp_path: Path) -> None:
    paths = written(tmp_path, *(f"{number}.png" for number in range(30)))
    fake.script.num_refusals = 20
    assert encode(fake, *paths, "--out", tmp_path / "rows").exit_code == 0
    fake.script.faults[content_digest(paths[3].read_bytes())] = Fault.HANG
    done = encode(fake, *paths, "--out", tmp_path / "rows", "--timeout-s", 1)
    fake.resume()
    assert done.exit_code == 1
    assert "1 of 30 images failed: 1 DEADLINE_EXCEEDED" in done.stderr
    assert len(paths_of(tmp_path / "rows")) == 29


# What --resume skips


@pytest.mark.parametrize("kind", ["--out", "--out-dir"])
def test_resume_goes_by_content_and_options(kind: str, fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, "a.png", "b.png", "c.png"), tmp_path / "rows"
    fake.script.failures[content_digest(paths[1].read_bytes())] = ItemFailed("broken", reason="X", status=3)
    assert encode(fake, *paths, kind, out, "--min-pixels", 4096).exit_code == 1
    fake.script.failures.clear()
    os.utime(paths[0])

    def resumed(*options: object) -> tuple[int, int, str]:
        num_sent = sent(fake)
        done = encode(fake, *paths, kind, out, "--resume", *options)
        return done.exit_code, sent(fake) - num_sent, done.stderr

    assert resumed("--min-pixels", 4096)[:2] == (0, 1)  # the one that had failed
    assert resumed("--min-pixels", 4096)[:2] == (0, 0)
    paths[2].write_bytes(b"other")
    code, num_sent, errors = resumed("--min-pixels", 4096)
    if kind == "--out-dir":
        assert (code, num_sent) == (0, 1)
        assert resumed()[:2] == (0, 3)
    else:
        assert (code, num_sent) == (1, 0)
        assert f"{paths[2]}: CHANGED: the rows there are of other content" in errors
        assert resumed()[2].count("CHANGED: ") == 3
        assert len(paths_of(out)) == 3


def test_two_runs_never_write_one_file(fake: FakeEncoder, tmp_path: Path) -> None:
    paths, out = written(tmp_path, "a.png"), tmp_path / "rows"
    file = GrowingFile(tmp_path / "rows.partial", ["a.png"], 1)
    assert "another run writes" in encode(fake, *paths, "--out", out).stderr
    file.close()
    assert encode(fake, *paths, "--out", out).exit_code == 0


@pytest.mark.parametrize("end", ["", ".partial"])
def test_two_files_with_rows_are_not_resumed(end: str, fake: FakeEncoder, tmp_path: Path) -> None:
    """The one that is not resumed would be replaced."""
    paths, out, partial = written(tmp_path, "a.png", "b.png"), tmp_path / "rows", tmp_path / "rows.partial"
    assert encode(fake, paths[0], "--out", out).exit_code == 0
    partial.write_bytes(out.read_bytes())
    done = encode(fake, *paths, "--out", out, "--resume")
    assert done.exit_code == 1
    assert f"{out} and {partial} both have rows: remove or rename one" in done.stderr
    if end:
        partial.write_bytes(b"")
    else:
        out.unlink()
    assert encode(fake, *paths, "--out", out, "--resume").exit_code == 0
    assert (paths_of(out), partial.exists()) == ([*map(str, paths)], False)


@pytest.mark.parametrize("options", [[], ["--shard-size", "1MB"]])
def test_a_new_run_keeps_the_rows_of_an_interrupted_one(
    options: list[str], fake: FakeEncoder, tmp_path: Path
) -> None:
    paths, out = written(tmp_path, "a.png", "b.png"), tmp_path / "rows"
    partial = tmp_path / ("rows-00001.safetensors.partial" if options else "rows.partial")
    partial.write_bytes(b"cut off")  # no rows: replaced
    assert encode(fake, paths[0], "--out", out, *options).exit_code == 0
    (finished,) = tmp_path.glob("rows*.safetensors" if options else "rows")
    finished.rename(partial)
    num_sent = sent(fake)
    done = encode(fake, *paths, "--out", out, *options)
    assert (done.exit_code, sent(fake)) == (1, num_sent)
    assert f"{partial} has rows of an interrupted run: --resume continues it; remove it for" in done.stderr
    assert encode(fake, *paths, "--out", out, *options, "--resume").exit_code == 0
    assert paths_of(finished) == [*map(str, paths)]


def ends_before_the_lock(monkeypatch: pytest.MonkeyPatch, partial: Path, out: Path) -> None:
    """Another run ends, and gives its file the final name, just before this one takes the lock."""
    flock = fcntl.flock

    def finish_first(fd: int, operation: int) -> None:
        if not out.exists():
            partial.rename(out)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", finish_first)


def test_a_file_that_was_renamed_before_its_lock_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, out = tmp_path / "rows.partial", tmp_path / "rows"
    append(partial, ["0"], 0, resumes=False)
    ends_before_the_lock(monkeypatch, partial, out)
    append(partial, ["1"], 1, resumes=False)
    assert (paths_of(out), paths_of(partial)) == (["0"], ["1"])


@pytest.mark.parametrize("options", [[], ["--shard-size", "1MB"]])
def test_a_file_is_locked_until_it_has_its_name(
    options: list[str], fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = written(tmp_path, "a.png")
    replace, num_locked = Path.replace, 0

    def replace_locked(self: Path, target: Path) -> Path:
        nonlocal num_locked
        if "index" not in self.name:
            with self.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_locked += 1
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_locked)
    assert encode(fake, path, "--out", tmp_path / "rows", *options).exit_code == 0
    assert num_locked == 1


ROWS = '"__metadata__":{"format":"vision_encoder.rows.v1",'
TENSORS = '"rows.0":{"shape":[1,1],"data_offsets":[0,0]},"grid_thw.0":{"shape":[3],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "7",
        "[" * 100_000,
        '{"__metadata__":[]}',
        "{" + ROWS + '"key.x":"00"}}',
        "{" + ROWS + '"key.00":"00"},' + TENSORS.replace(".0", ".00") + "}",
        "{" + ROWS + '"key.0":7},' + TENSORS + "}",
        "{" + ROWS + '"key.0":"no hex"},' + TENSORS + "}",
        "{" + ROWS + '"key.0":"00"},"rows.0":{"shape":[1,1]}}',
        "{" + ROWS + '"key.0":"00"},"rows.0":[]}',
        "{" + ROWS + '"key.0":"00"},"rows.0":{"shape":[1,1],"data_offsets":[0,"7"]}}',
        "{" + ROWS + '"key.0":"00"},"rows.0":{"shape":[1,1],"data_offsets":[0,0.5]}}',
        "{" + ROWS[:-1] + "\n}\n}\n}\n,",
    ],
)
def test_json_that_is_no_header_is_refused_by_name(header: str, fake: FakeEncoder, tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a.png")
    out, folder = tmp_path / "rows", tmp_path / "folder"
    encode(fake, path, "--out-dir", folder)
    (item,) = folder.rglob("*.safetensors")
    for file in (out, item):
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    done = encode(fake, path, "--out", out, "--resume")
    assert (done.exit_code, f"cannot resume {out}: " in done.stderr) == (1, True), done.stderr
    assert encode(fake, path, "--out-dir", folder, "--resume").exit_code == 0
    assert paths_of(item) == [str(path)]


@pytest.mark.parametrize("options", [[], ["--shard-size", "1kB"]])
@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"out_width": 16}, {"num_deepstack_levels": 1}])
def test_rows_of_two_models_are_never_in_one_file(
    change: dict[str, Any], options: list[str], fake: FakeEncoder, tmp_path: Path
) -> None:
    first, second, third = written(tmp_path, "a.png", "b.png", "c.png")
    out = tmp_path / "rows"
    assert encode(fake, first, second, "--out", out, *options).exit_code == 0
    before = fake.script.model
    fake.script.model = after = fake_model(**change)
    done = encode(fake, third, "--out", out, *options, "--resume")
    assert done.exit_code == 1
    old, new = (
        f"{model.dtype} rows of width {model.width} with {model.num_deepstack_levels} deepstack levels"
        for model in (before, after)
    )
    assert f"{out} has {old}, the server now gives {new}: write to another file" in done.stderr


def test_two_runs_write_an_item_apart(
    fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first writes."""
    (path,) = written(tmp_path, "a.png")
    folder, replace, names = tmp_path / "folder", Path.replace, list[str]()

    def run_again(self: Path, target: Path) -> Path:
        names.append(self.name)
        if len(names) == 1:
            assert encode(fake, path, "--out-dir", folder).exit_code == 0
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", run_again)
    assert encode(fake, path, "--out-dir", folder).exit_code == 0
    assert len(set(names)) == 2
    (item,) = (found for found in folder.rglob("*") if found.is_file())
    assert paths_of(item) == [str(path)]


def test_a_write_that_fails_leaves_no_file(fake: FakeEncoder, tmp_path: Path) -> None:
    (path,) = written(tmp_path, "a.png")
    folder = tmp_path / "folder"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        assert encode(fake, path, "--out-dir", folder).exit_code == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [found for found in folder.rglob("*") if found.is_file()] == []


def test_a_run_that_ended_while_another_resumes_keeps_its_rows(
    fake: FakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, out, partial = written(tmp_path, "a.png", "b.png"), tmp_path / "rows", tmp_path / "rows.partial"
    encode(fake, paths[0], "--out", partial)
    ends_before_the_lock(monkeypatch, partial, out)
    done = encode(fake, *paths, "--out", out, "--resume")
    assert (done.exit_code, f"another run wrote {partial} just now" in done.stderr) == (1, True), done.stderr
    assert paths_of(out) == [str(paths[0])]
