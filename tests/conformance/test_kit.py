"""The kit: our implementation passes, wrong ones fail, and the vectors stay as they are."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import ours
from tests.conformance.protocol import Failed, InProcess, Subprocess, Unsupported
from tests.conformance.run import check, lines_of, main, status
from tests.conformance.vectors import FOLDER, VERSION, Vectors, load
from vision_encoder.layout.control_page import CLOSED_WORD, WORD_BYTES

ROOT = Path(__file__).parents[2]
SUBJECTS = [one.subject for one in load()]


def of(*subjects: str) -> list[Vectors]:
    return [one for one in load() if one.subject in subjects]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_p07_our_answers_are_the_references(subject: str) -> None:
    """Timestamps among them: of the frames sampled, also where their number was clamped."""
    (report,) = check(InProcess(ours.implementation()), of(subject))
    assert report.supported
    assert report.failures == []
    assert report.num_passed == report.num_cases > 0


def test_a_versions_answers_never_change() -> None:
    files = sorted((FOLDER / "v1").glob("*.json"))
    found = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert found == "4c5489f83a9be59a3c1e067fae8bbc7dd8d60e570db926e39d8dea720b364f2d"


def mutated(value: Any, rng: random.Random) -> Any:
    """The answer with one leaf changed, or one element lost."""
    if isinstance(value, dict):
        name = rng.choice(list(value))
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list):
        if not value:
            return [0]
        place = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice([-1, 1])
    return value[:-1] + ("0" if value[-1] != "0" else "1")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_wrong_element_anywhere_fails(subject: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    right = ours.implementation()[subject]
    wrong = InProcess({subject: lambda asked: mutated(right(asked), rng)})
    (report,) = check(wrong, of(subject))
    assert report.num_passed == 0
    assert len(report.failures) == report.num_cases
    assert status([report], []) == 1
    shown = lines_of([report], VERSION)
    assert shown[1].startswith("FAIL")
    assert len(shown) <= 8


def from_the_time_axis(asked: Any) -> Any:
    """The mistake of p03: the next position from the first axis alone."""
    found = ours.positions_of(asked)
    total = found.num_tokens + asked["num_generated"]
    return {
        "positions": found.chunk(asked["start"], total).tolist(),
        "next_position": int(found.chunk(0, total)[0].max()) + 1,
    }


def clips_as_one_grid(asked: Any) -> Any:
    """A clip's frames numbered along the time axis, as in models without timestamps."""
    found = ours.positions_of(asked)
    prompt, frame = ours.prompt_of(asked), found.prompt.copy()
    for span in prompt.spans:
        for n, segment in enumerate(span.segments):
            frame[0, segment.start : segment.end] += n
    return {"positions": frame.tolist(), "delta": found.delta}


def pictures_before_clips(asked: Any) -> Any:
    """Grids concatenated by modality and not in prompt order."""
    items = sorted(asked["items"], key=lambda item: item["modality"])
    found = ours.positions_of({**asked, "items": items})
    return {"positions": found.prompt.tolist(), "delta": found.delta}


def side_by_width(asked: Any) -> Any:
    """next advances by the width alone."""
    found = ours.positions_of(asked)
    return {"positions": found.prompt.tolist(), "delta": int(found.prompt[2].max()) + 1 - found.num_tokens}


def closed_flag_ignored(asked: Any) -> Any:
    page = bytearray(base64.b64decode(asked["page_base64"]))
    page[CLOSED_WORD * WORD_BYTES] = 0
    return ours.answer_control_page({**asked, "page_base64": base64.b64encode(page).decode()})


def namespace_ignored(asked: Any) -> Any:
    return ours.answer_directory({**asked, "namespace": ""})


def levels_swapped(asked: Any) -> Any:
    answer = ours.answer_splice(asked)
    return {**answer, "deepstack": answer["deepstack"][::-1]}


def windows_from_the_first_row(asked: Any) -> Any:
    """A window that begins inside a vision run takes the item's rows from their start."""
    prompt = ours.prompt_of(asked)
    before = sum(prompt.visual_mask[: asked["start"]])
    answer = ours.answer_splice({**asked, "start": 0})
    levels = [level[: len(level) - before] for level in answer["deepstack"]]
    right = ours.answer_splice(asked)
    return {**right, "deepstack": levels}


def without_tags(asked: Any) -> Any:
    return ours.answer_pad_id({**asked, "modality": "image"})


def frames_as_asked_for(asked: Any) -> Any:
    """The mistake of p07: as many frames as the rate asks for, whatever bounds there are."""
    bounds = {"min_frames": 1, "max_frames": 10**9} if asked["family"] == "qwen_vl" else {}
    return ours.answer_frame_indices({**asked, **bounds})


def times_of_even_steps(asked: Any) -> Any:
    """The other mistake of p07: times from the rate that was asked for, not from the frames taken."""
    steps = [int(n * asked["source_fps"] / 2) for n in range(len(asked["indices"]))]
    return ours.answer_timestamps({**asked, "indices": steps})


def stretched(asked: Any) -> Any:
    """The mistake of p09: Kimi's picture resized to the padded size."""
    answer = ours.answer_target_size(asked)
    if asked["family"] == "qwen_vl":
        return answer
    return {**answer, "height": answer["padded_height"], "width": answer["padded_width"]}


@pytest.mark.parametrize(
    ("subject", "function"),
    [
        ("resumed_positions", from_the_time_axis),
        ("positions", clips_as_one_grid),
        ("positions", pictures_before_clips),
        ("positions", side_by_width),
        ("control_page", closed_flag_ignored),
        ("directory", namespace_ignored),
        ("splice", levels_swapped),
        ("splice", windows_from_the_first_row),
        ("pad_id", without_tags),
        ("frame_indices", frames_as_asked_for),
        ("timestamps", times_of_even_steps),
        ("target_size", stretched),
    ],
)
def test_p01_to_p09_known_mistakes_are_caught(subject: str, function: Any) -> None:
    """Each is a bug that was met in some engine; each gets other cases right."""
    (report,) = check(InProcess({subject: function}), of(subject))
    assert report.failures
    assert all("Error" not in failure for failure in report.failures)


@pytest.fixture
def our_process() -> Iterator[Subprocess]:
    process = Subprocess([sys.executable, "-m", "tests.conformance.serve"], timeout_s=120)
    yield process
    process.close()


def test_the_line_protocol_carries_every_subject(our_process: Subprocess) -> None:
    reports = check(our_process, load())
    assert [report.subject for report in reports if report.failures or not report.supported] == []
    with pytest.raises(Unsupported):
        our_process.ask("no such subject", {})
    with pytest.raises(Failed, match="InvalidRequest: a content digest has 32 bytes, got 1"):
        our_process.ask("pad_id", {"scheme": "sglang", "modality": "image", "digest": "00"})
    # An error is an answer: the next question is taken.
    (vectors,) = of("pad_id")
    assert our_process.ask("pad_id", vectors.cases[0].asked) == vectors.cases[0].expected


def scripted(code: str, timeout_s: float = 60) -> Subprocess:
    return Subprocess([sys.executable, "-c", code], timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        ("input(); print('hello')", 60, "not an answer: 'hello"),
        ("input(); print('[]')", 60, "not an answer"),
        ("""input(); print('{"id": 9, "output": {}}')""", 60, "answer 9 came to question 1"),
        ("""input(); print('{"id": 1}')""", 60, "neither output nor error"),
        ("raise SystemExit(3)", 60, "ended with status 3|takes no more questions"),
        ("import time; time.sleep(600)", 0.2, "no answer within 0.2 s"),
    ],
)
def test_a_process_that_leaves_the_protocol_fails(code: str, timeout_s: float, message: str) -> None:
    process = scripted(code, timeout_s)
    try:
        with pytest.raises(Failed, match=message):
            process.ask("pad_id", {})
        with pytest.raises(Failed):
            process.ask("pad_id", {})
    finally:
        process.close()


def test_an_implementation_of_one_subject() -> None:
    """What an author starts with."""
    reports = check(InProcess({"pad_id": ours.answer_pad_id}), load())
    assert [report.subject for report in reports if report.supported] == ["pad_id"]
    assert status(reports, []) == 0
    assert status(reports, ["positions"]) == 1
    assert any(line.split()[-2:] == ["not", "supported"] for line in lines_of(reports, VERSION))


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.conformance.run", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


WRONG = {"pad_id": lambda asked: {"pad_id": 1_000_000}}


def wrong_implementation() -> Any:
    return WRONG


def test_the_command_ends_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_command("--subject", "pad_id", "--subject", "positions")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["ok", "pad_id", "36/36"]
    assert main(["--implementation", f"{__name__}:wrong_implementation", "--subject", "pad_id"]) == 1
    assert "pad_id is 1000000, needs" in capsys.readouterr().out
    assert main(["--implementation", f"{__name__}:wrong_implementation", "--subject", "splice"]) == 1
    for arguments, message in (
        (["--subject", "rows"], "no subject rows; there are content_digest"),
        (["--vectors", "v0"], "holds no vectors"),
        (["--implementation", "tests.conformance.ours"], "module:factory"),
        (["--implementation", "tests.conformance.ours:nothing"], "nothing"),
        (["--command", "/nonexistent/engine"], "cannot be started"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
