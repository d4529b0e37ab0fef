"""The message that goes out to SGLang: the pickled frame, the rows' bytes, the times of clips."""

from __future__ import annotations

import pytest
import torch

from encoder_service.errors import UnsupportedContent
from encoder_service.protocols.sglang.push import Part, clip_times_s, head_frame, payload
from encoder_service.types import ClipFacts, EncodedItem, Grid, Modality
from tests.sglang.frames import Modality as ReadModality
from tests.sglang.frames import fields_of, message_of


def test_head_frame_golden() -> None:
    """Byte for byte: what an unpickler of SGLang 0.5.23 has been seen to take."""
    expected = (
        b"\x80\x03csglang.srt.disaggregation.encoder.receiver\nEmbeddingData\n)\x81}("
        b"X\x06\x00\x00\x00req_idX\x0e\x00\x00\x00r_local_part_1"
        b"X\x09\x00\x00\x00num_partsJ\x03\x00\x00\x00"
        b"X\x08\x00\x00\x00part_idxJ\x01\x00\x00\x00"
        b"X\x08\x00\x00\x00grid_dim](](J\x01\x00\x00\x00J\x04\x00\x00\x00J\x06\x00\x00\x00ee"
        b"X\x08\x00\x00\x00modalitycsglang.srt.multimodal.modality\nModality\nJ\x01\x00\x00\x00\x85R"
        b"X\x09\x00\x00\x00embeddingNX\x09\x00\x00\x00send_timeN"
        b"X\x05\x00\x00\x00dtypectorch\nfloat32\n"
        b"X\x05\x00\x00\x00shape](J\x06\x00\x00\x00J\x08\x00\x00\x00e"
        b"X\x07\x00\x00\x00_mr_ptrNX\x09\x00\x00\x00error_msgNX\x0a\x00\x00\x00error_codeN"
        b"X\x10\x00\x00\x00video_timestampsNX\x12\x00\x00\x00second_per_grid_tsNub."
    )
    part = Part("r_local_part_1", 3, 1, Modality.IMAGE)
    assert head_frame(part, [Grid(1, 4, 6)], [], torch.zeros(6, 8)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_receiver_reads_rows_and_fields(dtype: torch.dtype) -> None:
    rows = torch.randn(10, 6).to(dtype)
    part = Part("clip \udc80 ü", 70_000, 4, Modality.VIDEO)
    frame = head_frame(part, [Grid(2, 4, 6), Grid(1, 2, 2)], [[0.25, 1.5], [0.0]], rows)
    fields, received = message_of([frame, bytes(payload(rows))])
    assert torch.equal(received, rows)
    assert {name: value for name, value in fields.items() if value is not None} == {
        "req_id": "clip \udc80 ü",
        "num_parts": 70_000,
        "part_idx": 4,
        "grid_dim": [[2, 4, 6], [1, 2, 2]],
        "modality": ReadModality.VIDEO,
        "dtype": dtype,
        "shape": [10, 6],
        "video_timestamps": [[0.25, 1.5], [0.0]],
    }


def test_a_requests_text_never_becomes_opcodes() -> None:
    name = "\nX)\x81}(ub.cos\nsystem\n"
    frame = head_frame(Part(name, 1, 0, Modality.IMAGE), [], [], torch.zeros(1, 1))
    assert fields_of(frame)["req_id"] == name


def clip_of(grid: Grid, *timestamps_s: float, chunk_grids: tuple[Grid, ...] = ()) -> EncodedItem:
    return EncodedItem(b"", b"", grid, torch.zeros(1, 1), 0, ClipFacts(timestamps_s, chunk_grids))


@pytest.mark.parametrize(
    ("timestamps_s", "num_steps", "expected"),
    [
        ((0.0, 0.5, 1.0, 1.5), 2, [0.25, 1.25]),
        ((0.0, 0.5, 1.0), 2, [0.25, 1.0]),  # the last frame counts twice
        ((0.5,), 1, [0.5]),
        ((0.0, 1.0, 2.0, 3.0), 4, [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_p07_a_step_has_the_middle_of_its_frames_times(
    timestamps_s: tuple[float, ...], num_steps: int, expected: list[float]
) -> None:
    assert clip_times_s(clip_of(Grid(num_steps, 4, 4), *timestamps_s), "qwen3_vl") == expected


def test_clips_in_chunks_are_not_sglangs() -> None:
    with pytest.raises(UnsupportedContent, match="no clips of this model"):
        clip_times_s(clip_of(Grid(2, 4, 4), 0.0, 0.5, chunk_grids=(Grid(2, 4, 4),)), "kimi_k25")


def test_clips_of_glm_are_refused() -> None:
    """SGLang writes their rows into the prompt without the times between them."""
    with pytest.raises(UnsupportedContent, match="no clips of this model"):
        clip_times_s(clip_of(Grid(1, 4, 4), 0.0, 0.5), "glm5_next")
