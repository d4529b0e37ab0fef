"""Keys of clips that come as frames: each turn of the rule is among the vectors, and mistakes in it are
caught."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance import ours
from tests.conformance.protocol import InProcess
from tests.conformance.run import check
from tests.conformance.vectors import load
from vision_encoder.layout import keys as layout

(VECTORS,) = (one for one in load() if one.subject == "frames_key")
CASES = {case.name: case for case in VECTORS.cases}


def test_p11_the_rules_turns_are_among_the_vectors() -> None:
    whole = CASES["24 a second, written without a fraction"].expected
    assert CASES["no rate"].expected == CASES["24 a second"].expected == whole
    keys = {name: case.expected["key"] for name, case in CASES.items() if "key" in case.expected}
    assert len(set(keys.values())) == len(keys) - 2
    refused = [name for name, case in CASES.items() if case.expected == {"refused": True}]
    assert {"a rate of 0", "a rate below 0", "a rate and timestamps", "a timestamp too few"} <= set(refused)
    assert len(refused) + len(keys) == len(CASES)
    # When frames are shown is the key's matter, their shape the digest's.
    digests = {name: CASES[name].expected["digest"] for name in ("no rate", "timestamps", "transposed shape")}
    assert digests["no rate"] == digests["timestamps"] != digests["transposed shape"]


def keyed(asked: Any, source: str) -> Any:
    """Our answer with another source in its key."""
    answer = ours.answer_frames_key(asked)
    if "key" not in answer:
        return answer
    item = ours.frames_item(asked)
    key = layout.embedding_key(
        bytes.fromhex(answer["digest"]),
        model_fingerprint=bytes.fromhex(asked["model_fingerprint"]),
        preprocess_fingerprint=bytes.fromhex(asked["preprocess_fingerprint"]),
        dtype=asked["dtype"],
        namespace=asked["namespace"],
        modality=item.modality.value,
        options=item.options.given(),
        source=source,
    )
    return {**answer, "key": key.hex()}


def no_rate_as_nothing(asked: Any) -> Any:
    is_without = asked["fps"] is None and asked["timestamps_s"] is None
    return keyed(asked, "frames:fps=" if is_without else ours.frames_item(asked).source)


def as_a_file(asked: Any) -> Any:
    """Frames under the key of an encoded file: every rate the same rows."""
    return keyed(asked, "encoded")


def rates_as_single_floats(asked: Any) -> Any:
    """25 is the same in both; 24000/1001 is not."""
    if asked["fps"] is None:
        return ours.answer_frames_key(asked)
    (rounded,) = struct.unpack("<f", struct.pack("<f", asked["fps"]))
    return ours.answer_frames_key({**asked, "fps": rounded})


def a_rate_of_0_as_none(asked: Any) -> Any:
    return ours.answer_frames_key({**asked, "fps": asked["fps"] or None})


def timestamps_as_a_rate(asked: Any) -> Any:
    return ours.answer_frames_key({**asked, "timestamps_s": None})


def frames_flat(asked: Any) -> Any:
    """Frames of another shape as the same content."""
    num_frames, height, width, _ = asked["shape"]
    return ours.answer_frames_key({**asked, "shape": [num_frames, 1, height * width, 3]})


@pytest.mark.parametrize(
    "mistaken",
    [
        no_rate_as_nothing,
        as_a_file,
        rates_as_single_floats,
        a_rate_of_0_as_none,
        timestamps_as_a_rate,
        frames_flat,
    ],
)
def test_p11_mistakes_in_keys_of_frames_are_caught(mistaken: Callable[[Any], Any]) -> None:
    """Each gets other cases right, the refused ones at least or the caller's digest."""
    (report,) = check(InProcess({"frames_key": mistaken}), [VECTORS])
    assert 0 < len(report.failures) < report.num_cases
    assert all("Error" not in failure for failure in report.failures)
