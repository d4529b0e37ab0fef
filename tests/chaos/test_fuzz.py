"""Hundreds of bad inputs; ``fuzz_run`` as a program sends ten thousand."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest

from tests.chaos.fuzz_messages import Call
from tests.chaos.fuzz_run import fuzz, judge_events, judge_status
from vision_encoder.v1 import encoder_pb2 as pb

NUM_INPUTS = 400


@pytest.mark.extended
def test_p33_bad_inputs_crash_nothing_and_leave_nothing(tmp_path: Path) -> None:
    report = fuzz(NUM_INPUTS, random.SystemRandom().randrange(1 << 30), tmp_path)
    assert report.complaints == [], f"seed {report.seed}"
    assert report.num_inputs == NUM_INPUTS
    assert len(report.answers) > 8, report.answers  # the inputs fail in many ways
    assert report.answers["rows"] > 10


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([], "1 items were asked for"),
        ([pb.ItemEvent(failure=pb.ItemFailure(reason="INTERNAL", message="x"))], "fault INTERNAL"),
        ([pb.ItemEvent(result=pb.ItemResult())] * 2, "answered were {0: 2}"),
        ([pb.ItemEvent(item_index=1, result=pb.ItemResult())], "answered were {1: 1}"),
    ],
)
def test_the_judge_finds_faults(events: list[pb.ItemEvent], complaint: str) -> None:
    call = Call("images", "Encode", pb.EncodeRequest(items=[pb.Item()]).SerializeToString())
    assert any(complaint in answer for answer in judge_events(call, events) if answer.startswith("fault"))
    assert judge_status(grpc.StatusCode.INTERNAL, "x").startswith("fault")
    assert judge_status(grpc.StatusCode.UNKNOWN, None).startswith("fault")
    assert judge_status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL: y") == "NOT_FOUND UNKNOWN_MODEL"
