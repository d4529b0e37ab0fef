"""SGLang's requests as the pipeline's items, and what a clip's prompt says."""

from __future__ import annotations

import base64
import hashlib
import urllib.parse

import pytest
import torch
from pydantic import ValidationError

from encoder_service.errors import InvalidDigest, InvalidRequest, UnsupportedContent
from encoder_service.protocols.sglang.server import MediaItem, clip_times_s, inline_content
from encoder_service.types import ClipFacts, EncodedItem, Grid

DATA = b"the bytes of a file"
TEXT = base64.b64encode(DATA).decode()
DIGEST = hashlib.sha256(DATA).digest()


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
    assert clip_times_s(clip_of(Grid(num_steps, 4, 4), *timestamps_s)) == expected


def test_clips_in_chunks_are_not_sglangs() -> None:
    with pytest.raises(UnsupportedContent, match="no clips of this model"):
        clip_times_s(clip_of(Grid(2, 4, 4), 0.0, 0.5, chunk_grids=(Grid(2, 4, 4),)))


QUOTED = urllib.parse.quote(TEXT, safe="")


@pytest.mark.parametrize(
    "found",
    [TEXT, f"data:image/png;base64,{TEXT}", {"url": f"data:;base64,{TEXT}", "detail": "high"}]
    + [f"data:image/png;{name},{TEXT}" for name in ("BASE64", "Base64", " base64", "base64 ")]
    + [f"data:image/png;charset=x;base64,{TEXT}"]
    + [f"DATA:image/png;base64,{TEXT}", f"data: image/png ; base64 ,{TEXT}"]
    # SGLang's encoder drops what precedes the comma.
    + [f"data:,{TEXT}", f"data:image/png,{TEXT}"]
    + [f"data:image/png;base64,{QUOTED}", f"data:;base64,%{ord(TEXT[0]):02x}{TEXT[1:]}"],
)
def test_an_item_is_a_data_uri_or_base64(found: object) -> None:
    assert inline_content(MediaItem.model_validate(found)) == DATA


NO_BASE64 = ("!", "-_-_", "QUI", "Q", "QQ==QQ==", "Q\nUJD", "QUJD ", "%", "%zz", "\ud800%")


@pytest.mark.parametrize(
    "text",
    ["data:", "data:image/png;base64", f"data:image/png;base64{TEXT}", f"data:{TEXT}"]  # no comma
    + [f"data:;base64,{text}" for text in NO_BASE64]
    + [f" data:;base64,{TEXT}", f"date:;base64,{TEXT}", f"file:///{TEXT}"]
    + ["é", QUOTED, f"{TEXT[:4]}\n{TEXT[4:]}"],
)
def test_what_is_no_base64_is_refused_with_words(text: str) -> None:
    """As by SGLang's encoder and vLLM: no other alphabet, no white space, no padding left out."""
    with pytest.raises(InvalidRequest, match=r"cannot be decoded"):
        inline_content(MediaItem(url=text))


def test_p48_a_stated_hash_is_verified() -> None:
    item = MediaItem(url=TEXT, content_hash=f"sha256:{DIGEST.hex().upper()}")
    assert item.digest == DIGEST
    assert inline_content(item) == DATA
    with pytest.raises(InvalidDigest, match=f"{32 * '00'}.*{DIGEST.hex()}"):
        inline_content(MediaItem(url=TEXT, content_hash=f"sha256:{32 * '00'}"))


@pytest.mark.parametrize(
    "found",
    [None, 3, [TEXT], {}, {"url": None}, {"url": TEXT, "content_hash": "sha256:00"}]
    + [{"url": TEXT, "content_hash": f"{prefix}{DIGEST.hex()}"} for prefix in ("", "sha512:", "sha256: ")],
)
def test_other_items_are_refused(found: object) -> None:
    with pytest.raises(ValidationError):
        MediaItem.model_validate(found)
