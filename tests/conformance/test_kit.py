"""The kit: our implementation passes, wrong ones fail, and the vectors stay as they are."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from encoder_service.checkpoints.families import FAMILIES
from lm_adapter.engines.shared.checkpoint import read_config, vision_interface
from tests.conformance import ours
from tests.conformance.protocol import Failed, InProcess, Subprocess, Unsupported
from tests.conformance.run import check, lines_of, main, status
from tests.conformance.vectors import FOLDER, VERSION, Vectors, load
from tests.published import PUBLISHED

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


# Subjects that were added later, by the beginning of their names.
ADDED = {
    "centred_": "cbce7377eafa11f1f4972465636c5bd9525784035e3a6285f3e7c5ed7bbc3cb9",
    "glm_": "41f7ba35ed8534de0ae14c4717d67cd6de58d9e106270d7315d6d5ed0f294659",
    "model_": "afd206426c88b425cf1bab3d466421cad97b632047b56d2c73d42e8b10ba4dd3",
}


def test_a_versions_answers_never_change() -> None:
    files = sorted((FOLDER / "v1").glob("*.json"))
    by_group = {group: [file for file in files if file.name.startswith(group)] for group in ADDED}
    first = [file for file in files if not file.name.startswith(tuple(ADDED))]
    hashes = {
        group: hashlib.sha256(b"".join(file.read_bytes() for file in members)).hexdigest()
        for group, members in {"": first, **by_group}.items()
    }
    assert hashes == {"": "880cc86ee7464decea99ab34dee9372e701c51c4a76b1ea0c09fcf5e15b18020", **ADDED}


def test_every_family_is_asked_for() -> None:
    asked = [case.asked for vectors in of("grid", "model_images") for case in vectors.cases]
    by_rule = {"qwen_vl": ("qwen3_vl", "qwen3_5")}
    found = {name for one in asked if "family" in one for name in by_rule.get(one["family"], [one["family"]])}
    found |= {
        vision_interface(read_config(PUBLISHED / one["model"])).family for one in asked if "model" in one
    }
    assert found == {*FAMILIES}


def test_the_line_protocol_carries_every_subject() -> None:
    our_process = Subprocess([sys.executable, "-m", "tests.conformance.serve"], timeout_s=120)
    reports = check(our_process, load())
    assert [report.subject for report in reports if report.failures or not report.supported] == []
    with pytest.raises(Unsupported):
        our_process.ask("no such subject", {})
    with pytest.raises(Failed, match="InvalidRequest: a content digest has 32 bytes, got 1"):
        our_process.ask("pad_id", {"scheme": "sglang", "modality": "image", "digest": "00"})
    # An error is an answer: the next question is taken.
    (vectors,) = of("pad_id")
    assert our_process.ask("pad_id", vectors.cases[0].asked) == vectors.cases[0].expected
    our_process.close()


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
    process = Subprocess([sys.executable, "-c", code], timeout_s=timeout_s)
    for text in (message, None):  # every later question fails, too
        with pytest.raises(Failed, match=text):
            process.ask("pad_id", {})
    process.close()


def test_an_implementation_of_one_subject() -> None:
    """What an author starts with."""
    reports = check(InProcess({"pad_id": ours.answer_pad_id}), load())
    assert [report.subject for report in reports if report.supported] == ["pad_id"]
    assert status(reports, []) == 0
    assert status(reports, ["positions"]) == 1
    assert any(line.split()[-2:] == ["not", "supported"] for line in lines_of(reports, VERSION))


def wrong_implementation() -> Any:
    return {"pad_id": lambda asked: {"pad_id": 1_000_000}}


def test_the_command_ends_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--subject", "pad_id", "--subject", "positions"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["ok", "pad_id", "36/36"]
    assert main(["--implementation", f"{__name__}:wrong_implementation", "--subject", "pad_id"]) == 1
    assert "pad_id is 1000000, needs" in capsys.readouterr().out
    assert main(["--implementation", f"{__name__}:wrong_implementation", "--subject", "splice"]) == 1
    for arguments, message in (
        (["--subject", "rows"], "no subject rows; there are centred_positions"),
        (["--vectors", "v0"], "holds no vectors"),
        (["--implementation", "tests.conformance.ours"], "module:factory"),
        (["--implementation", "tests.conformance.ours:nothing"], "nothing"),
        (["--command", "/nonexistent/engine"], "cannot be started"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
