"""Which JPEG files count as whole and plain: all that an encoder writes, none that is cut, short or odd."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest
from PIL import Image

from encoder_service.ingest.jpeg_scans import PlainJpeg, read_plain_jpeg
from tests.unit.ingest import image_files

FILES = image_files.every_file()
HEIGHT, WIDTH = 45, 70


def jpeg(height: int = HEIGHT, width: int = WIDTH, *, mode: str = "RGB", **options: Any) -> bytes:
    picture = Image.fromarray(image_files.pixels(height, width)).convert(mode)
    return image_files.encode(picture, "JPEG", **{"quality": 85} | options)


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """(marker, start, end) of every segment and of the bits behind a scan's header, in order."""
    found, position = [], 2
    while data[position + 1] != 0xD9:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == 0xDA:
            bits = re.compile(rb"\xff[^\x00\xd0-\xd7]").search(data, end)
            assert bits is not None
            end = bits.start()
        found.append((data[position + 1], position, end))
        position = end
    return found


@pytest.mark.parametrize("progressive", [False, True], ids=["sequential", "progressive"])
@pytest.mark.parametrize(("subsampling", "name"), [(0, "444"), (1, "422"), (2, "420")])
@pytest.mark.parametrize("restarts", [0, 1, 5])
def test_what_an_encoder_writes_is_plain_but_for_restarts_in_progressive_files(
    progressive: bool, subsampling: int, name: str, restarts: int
) -> None:
    for height, width in ((HEIGHT, WIDTH), (1, 1), (3, 17), (160, 9)):
        data = jpeg(
            height,
            width,
            progressive=progressive,
            subsampling=subsampling,
            restart_marker_blocks=restarts,
            icc_profile=b"profile",
            exif=image_files.exif(6),
            comment=b"\xff\xd9 in a comment",
        )
        is_plain = not (progressive and restarts)
        assert read_plain_jpeg(data) == (PlainJpeg(height, width, name, progressive) if is_plain else None)


def test_grey_is_plain_with_or_without_progression() -> None:
    assert read_plain_jpeg(jpeg(mode="L")) == PlainJpeg(HEIGHT, WIDTH, "grey", False)
    assert read_plain_jpeg(jpeg(mode="L", progressive=True)) == PlainJpeg(HEIGHT, WIDTH, "grey", True)


def test_no_other_format_is_plain() -> None:
    plain = {name for name, data in FILES.items() if read_plain_jpeg(data) is not None}
    assert plain == {"jpeg-rgb", "jpeg-444", "jpeg-progressive", "jpeg-grey"}


@pytest.mark.parametrize(
    "data",
    [jpeg(), jpeg(progressive=True), jpeg(restart_marker_blocks=3), jpeg(mode="L")],
    ids=["sequential", "progressive", "restarts", "grey"],
)
def test_no_part_of_a_file_is_plain(data: bytes) -> None:
    assert read_plain_jpeg(data) is not None
    assert not [end for end in range(len(data)) if read_plain_jpeg(data[:end]) is not None]
    assert read_plain_jpeg(data + b"\0") is None, "nothing follows the end"
    assert read_plain_jpeg(data + b"\xff\xd9") is None


def test_a_progressive_file_without_one_of_its_scans_is_not() -> None:
    data = jpeg(progressive=True)
    scans = [(start, end) for marker, start, end in segments(data) if marker == 0xDA]
    assert len(scans) > 4
    for start, end in scans:
        assert read_plain_jpeg(data[:start] + data[end:]) is None
        assert read_plain_jpeg(data[:end] + data[start:]) is None, "nor with one of them twice"


def test_a_sequential_file_has_one_scan() -> None:
    data = jpeg()
    ((start, end),) = [(start, end) for marker, start, end in segments(data) if marker == 0xDA]
    assert read_plain_jpeg(data[:end] + data[start:]) is None
    assert read_plain_jpeg(data[:start] + data[end:]) is None


def test_restarts_have_their_turn_and_their_interval() -> None:
    data = jpeg(restart_marker_blocks=2)
    second = data.index(b"\xff\xd1")
    assert read_plain_jpeg(data[: second + 1] + b"\xd3" + data[second + 2 :]) is None
    ((start, end),) = [(start, end) for marker, start, end in segments(data) if marker == 0xDD]
    assert read_plain_jpeg(data[:start] + data[end:]) is None


def frame_start(data: bytes) -> int:
    return next(start for marker, start, _ in segments(data) if marker in (0xC0, 0xC2))


def changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def adobe(transform: int) -> bytes:
    return b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform])


def test_samples_that_not_every_reader_takes_for_ycbcr_are_not() -> None:
    data = jpeg()
    rgb = adobe(0)
    assert read_plain_jpeg(data[:2] + adobe(1) + data[2:]) is not None
    assert read_plain_jpeg(data[:2] + rgb + data[2:]) is None
    assert read_plain_jpeg(data[:2] + adobe(2) + data[2:]) is None
    jfif = next(end for marker, _, end in segments(data) if marker == 0xE0)
    bare = data[:2] + data[jfif:]
    assert read_plain_jpeg(bare) is not None, "one, two, three are YCbCr to everybody"
    start = frame_start(data)
    named = data
    for at, name in zip((start + 10, start + 13, start + 16), b"RGB", strict=True):
        named = changed(named, at, name)
    scan = next(start for marker, start, _ in segments(named) if marker == 0xDA)
    for at, name in zip((scan + 5, scan + 7, scan + 9), b"RGB", strict=True):
        named = changed(named, at, name)
    assert read_plain_jpeg(named) is None


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, 12), (4, 16), (9, 4), (9, 2), (11, 0x12), (11, 0x41), (14, 0x21), (13, 1), (1, 0xC9), (1, 0xC3)],
    ids=["12-bit", "16-bit", "four", "two", "440", "411", "chroma", "same-id", "arithmetic", "lossless"],
)
def test_odd_frames_are_not(offset: int, value: int) -> None:
    data = jpeg(subsampling=0)
    assert read_plain_jpeg(changed(data, frame_start(data) + offset, value)) is None


def test_sides_of_zero_and_headers_past_the_end_are_not() -> None:
    data = jpeg()
    start = frame_start(data)
    assert read_plain_jpeg(data[: start + 5] + b"\0\0" + data[start + 7 :]) is None
    assert read_plain_jpeg(data[: start + 2] + b"\xff\xff" + data[start + 4 :]) is None
    assert read_plain_jpeg(data[: start + 2] + b"\0\1" + data[start + 4 :]) is None
    assert read_plain_jpeg(data[: start + 2] + b"\0\2" + data[start + 4 :]) is None


@pytest.mark.parametrize(
    ("marker", "offset", "value"),
    [(0xC4, 4, 0x04), (0xC4, 4, 0x20), (0xC4, 5, 3), (0xC4, 20, 255), (0xC4, 21, 16), (0xC4, 3, 30),
     (0xDB, 4, 0x04), (0xDB, 4, 0x20), (0xDB, 4, 0x10), (0xDB, 3, 66)],
    ids=["number", "class", "overfull", "too-many", "first-coefficient", "short", "quantisation-number",
         "quantisation-precision", "quantisation-long", "quantisation-short"],
)  # fmt: skip
def test_tables_that_cannot_be_are_not(marker: int, offset: int, value: int) -> None:
    """The first table of Huffman codes is one of first coefficients: class and number, sixteen numbers of
    codes, values."""
    data = jpeg()
    start = next(start for found, start, _ in segments(data) if found == marker)
    assert data[start + offset] != value
    assert read_plain_jpeg(changed(data, start + offset, value)) is None


def test_more_codes_than_there_is_room_for_are_not() -> None:
    data = jpeg()
    start = next(start for found, start, _ in segments(data) if found == 0xC4) + 5
    numbers = list(data[start : start + 16])
    assert not numbers[0]
    many = next(place for place, number in enumerate(numbers) if number >= 3)
    full = changed(changed(data, start, 3), start + many, numbers[many] - 3)
    assert read_plain_jpeg(full) is None
    with pytest.raises(OSError), Image.open(io.BytesIO(full)) as picture:
        picture.load()


@pytest.mark.parametrize("marker", [0xC4, 0xDB, 0xC0])
def test_a_file_without_one_of_its_tables_is_not(marker: int) -> None:
    data = jpeg()
    places = [(start, end) for found, start, end in segments(data) if found == marker]
    assert places
    for start, end in places:
        assert read_plain_jpeg(data[:start] + data[end:]) is None


def test_no_bytes_raise() -> None:
    seed = random.randrange(1 << 32)
    random_ = random.Random(seed)
    files = [jpeg(), jpeg(progressive=True), jpeg(mode="L", restart_marker_blocks=1), b"", b"\xff\xd8"]
    for number in range(3000):
        broken = bytearray(random_.choice(files))
        for _ in range(random_.randint(1, 5) if broken else 0):
            # Where the headers are, mostly.
            broken[random_.randrange(min(len(broken), random_.choice([700, 10_000])))] = random_.randrange(
                256
            )
        found = read_plain_jpeg(bytes(broken))
        assert found is None or min(found.height, found.width) > 0, f"file {number} of seed {seed}"


def test_a_plain_file_is_one_that_pillow_reads_without_a_word() -> None:
    """Of damaged files, those that still count as plain: the host finds nothing missing in them either."""
    seed = random.randrange(1 << 32)
    random_ = random.Random(seed)
    num_plain = 0
    for number in range(1000):
        data = jpeg(progressive=number % 2 == 0, restart_marker_blocks=number % 3)
        cut = random_.randrange(len(data) - 2)
        if random_.random() < 0.5:
            broken = data[:cut] + data[cut + random_.randint(1, 40) :]
        else:
            broken = changed(data, cut, random_.randrange(256))
        found = read_plain_jpeg(broken)
        if found is None:
            continue
        num_plain += 1
        with Image.open(io.BytesIO(broken)) as picture:
            try:
                picture.load()
            except Exception as error:
                pytest.fail(f"file {number} of seed {seed}: {error}")
            assert picture.size == (found.width, found.height), f"file {number} of seed {seed}"
    assert num_plain > 300
