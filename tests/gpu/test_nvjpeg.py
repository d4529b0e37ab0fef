"""JPEG files decoded by nvJPEG: how near its pixels are to the host's, that errors are the host's, that
threads and memory are in order, and a whole service's rows.

The limits are docs/resize.md's. Every assertion says what was found.
"""

from __future__ import annotations

import io
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("nvidia.nvimgcodec", exc_type=ImportError)

from encoder_service.errors import VisionEncoderError
from encoder_service.ingest.decode import DecodeLimits, decode_rgb
from encoder_service.ingest.device_decode import DeviceDecoding, open_decoding
from encoder_service.towers.synthetic import make_checkpoint
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.integration.conftest import running
from tests.unit.ingest import image_files

pytestmark = pytest.mark.gpu

PHOTOS = sorted((Path(__file__).parents[1] / "data" / "photos").glob("*.jpg"))
LIMITS = DecodeLimits(1 << 28, 1 << 26)
SUBSAMPLINGS = {"444": 0, "422": 1, "420": 2}
NUM_THREADS = 16
MIB = 1 << 20


class Limit(NamedTuple):
    """mean: of the differences, in levels. share: of values that are at most NEAR levels apart."""

    mean: float
    share: float


NEAR = 3
FULL_CHROMA, HALF_CHROMA = Limit(0.5, 0.999), Limit(1.0, 0.98)


@pytest.fixture(scope="module")
def decoding(device: torch.device) -> Iterator[DeviceDecoding]:
    found = open_decoding("device", device)
    assert found is not None
    yield found
    torch.cuda.synchronize(device)


def photograph(height: int, width: int, seed: int) -> Image.Image:
    """Coarse colours, smoothly enlarged, with a little noise: as soft and as rough as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(0, 4, (height, width, 1)).round().astype(np.int16)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    return image_files.encode(picture, "JPEG", **{"quality": 90, "subsampling": 2} | options)


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def check_near(found: np.ndarray, expected: np.ndarray, limit: Limit, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape}, Pillow's is {expected.shape}"
    apart = np.abs(found.astype(np.int16) - expected.astype(np.int16))
    mean, share = float(apart.mean()), float((apart <= NEAR).mean())
    worst = np.unravel_index(int(apart.argmax()), apart.shape)
    text = (
        f"{what}: mean {mean:.3f} levels, {share:.4%} of values within {NEAR}, by channel "
        f"{apart.mean((0, 1)).round(3).tolist()}, at most {apart.max()} at (row, column, channel) "
        f"{tuple(int(place) for place in worst)} of {apart.shape}"
    )
    print(text)
    assert mean < limit.mean, f"{text}; {limit} is allowed"
    assert share >= limit.share, f"{text}; {limit} is allowed"


def decoded(decoding: DeviceDecoding, data: bytes, what: str) -> np.ndarray:
    """The device's pixels. Fails where the host had to decode them."""
    before = dict(decoding.counts)
    pixels = decode_rgb(data, LIMITS, decoding=decoding).numpy()
    places = [place for place, number in decoding.counts.items() if number != before[place]]
    assert places == ["device"], f"{what} was decoded on the {places}"
    return pixels


# Pixels


@pytest.mark.parametrize("progressive", [False, True], ids=["sequential", "progressive"])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "grey"])
def test_pixels_are_within_the_limits(subsampling: str, progressive: bool, decoding: DeviceDecoding) -> None:
    limit = FULL_CHROMA if subsampling in ("444", "grey") else HALF_CHROMA
    mode = "L" if subsampling == "grey" else "RGB"
    seed = random.randrange(1 << 20)
    pictures = {
        f"made {seed}+{one}": photograph(300 + 97 * one, 700 - 55 * one, seed + one) for one in range(4)
    }
    for path in PHOTOS[:3]:
        with Image.open(path) as picture:
            pictures[path.name] = picture.convert("RGB")
    for name, picture in pictures.items():
        data = jpeg(
            picture.convert(mode), subsampling=SUBSAMPLINGS.get(subsampling, 0), progressive=progressive
        )
        what = f"{name} {picture.size} {subsampling} progressive={progressive}"
        check_near(decoded(decoding, data, what), by_pillow(data), limit, what)


@pytest.mark.parametrize("size", [(1, 1), (17, 3), (31, 33), (63, 900), (900, 63)], ids=str)
def test_small_images_are_the_hosts(size: tuple[int, int], decoding: DeviceDecoding) -> None:
    for subsampling in SUBSAMPLINGS.values():
        data = jpeg(photograph(*size, seed=5), subsampling=subsampling)
        before = decoding.counts["host_small"]
        found = decode_rgb(data, LIMITS, decoding=decoding)
        assert torch.equal(found, decode_rgb(data, LIMITS))
        assert decoding.counts["host_small"] == before + 1


@pytest.mark.parametrize("size", [(64, 64), (64, 65), (65, 64), (79, 113)], ids=str)
def test_the_smallest_images_of_the_devices(size: tuple[int, int], decoding: DeviceDecoding) -> None:
    seed = random.randrange(1 << 20)
    for name, subsampling in SUBSAMPLINGS.items():
        for number in range(8):
            data = jpeg(photograph(*size, seed=seed + number), subsampling=subsampling)
            limit = FULL_CHROMA if name == "444" else HALF_CHROMA
            what = f"{size} {name} made {seed}+{number}"
            check_near(decoded(decoding, data, what), by_pillow(data), limit, what)


@pytest.mark.parametrize("size", [(67, 4001), (4001, 67), (641, 479), (3000, 4000)], ids=str)
def test_odd_and_large_sides(size: tuple[int, int], decoding: DeviceDecoding) -> None:
    data = jpeg(photograph(*size, seed=6))
    check_near(decoded(decoding, data, str(size)), by_pillow(data), HALF_CHROMA, str(size))


@pytest.mark.parametrize("blocks", [1, 7, 64])
def test_restart_markers_profiles_and_comments(blocks: int, decoding: DeviceDecoding) -> None:
    for progressive in (False, True):
        data = jpeg(
            photograph(333, 517, seed=7),
            restart_marker_blocks=blocks,
            progressive=progressive,
            icc_profile=b"\xff\xd9 no profile" * 9,
            comment=b"\xff\xda",
            optimize=True,
        )
        if progressive:  # nvJPEG makes other pictures of some, and fails at others
            before = decoding.counts["host_format"]
            assert torch.equal(decode_rgb(data, LIMITS, decoding=decoding), decode_rgb(data, LIMITS))
            assert decoding.counts["host_format"] == before + 1
            continue
        what = f"every {blocks} blocks"
        check_near(decoded(decoding, data, what), by_pillow(data), HALF_CHROMA, what)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(orientation: int, decoding: DeviceDecoding) -> None:
    data = jpeg(photograph(120, 200, seed=8), subsampling=0, exif=image_files.exif(orientation))
    found = decoded(decoding, data, f"orientation {orientation}")
    check_near(found, decode_rgb(data, LIMITS).numpy(), FULL_CHROMA, f"orientation {orientation}")


def test_memory_of_the_callers_is_filled(decoding: DeviceDecoding) -> None:
    data = jpeg(photograph(200, 300, seed=9))
    expected = decoded(decoding, data, "new memory")
    for pinned in (True, False):
        out = torch.empty((200, 300, 3), dtype=torch.uint8, pin_memory=pinned)
        assert decode_rgb(data, LIMITS, out, decoding) is out
        assert np.array_equal(out.numpy(), expected), f"pinned={pinned}"


def test_the_decoder_in_keys_is_the_same_each_time(decoding: DeviceDecoding, device: torch.device) -> None:
    again = open_decoding("device", device)
    assert again is not None
    assert again.fingerprint(bytes(32)) == decoding.fingerprint(bytes(32))


# Damage


def outcome(data: bytes, decoding: DeviceDecoding | None) -> Any:
    try:
        return tuple(decode_rgb(data, LIMITS, decoding=decoding).shape)
    except VisionEncoderError as error:
        return type(error).__name__, error.message, error.details


def test_damaged_files_end_as_on_the_host(decoding: DeviceDecoding) -> None:
    seed = random.randrange(1 << 32)
    random_ = random.Random(seed)
    sound = [
        jpeg(photograph(90, 130, 1)),
        jpeg(photograph(90, 130, 2), progressive=True, subsampling=0),
        jpeg(photograph(64, 64, 3), restart_marker_blocks=3),
        jpeg(photograph(90, 130, 4).convert("L"), subsampling=0),
    ]
    before = [decoded(decoding, data, "sound") for data in sound]
    counts = dict(decoding.counts)
    num_errors = 0
    for number in range(600):
        broken = bytearray(sound[number % len(sound)])
        match random_.randrange(4):
            case 0:
                del broken[random_.randrange(2, len(broken)) :]
            case 1:
                start = random_.randrange(2, len(broken) - 2)
                del broken[start : start + random_.randint(1, 50)]
            case 2:  # where it shows to nobody but the decoder
                for _ in range(random_.randint(1, 30)):
                    broken[random_.randrange(len(broken) * 3 // 5, len(broken) - 2)] = random_.randrange(255)
            case _:
                for _ in range(random_.randint(1, 4)):
                    broken[random_.randrange(min(len(broken), 700))] = random_.randrange(256)
        expected = outcome(bytes(broken), None)
        found = outcome(bytes(broken), decoding)
        num_errors += not isinstance(expected[0], int)
        assert found == expected, f"file {number} of seed {seed}"
    places = {place: number - counts[place] for place, number in decoding.counts.items()}
    print(f"600 damaged files, {num_errors} refused by the host; decoded on {places}")
    assert num_errors > 50, num_errors
    for data, pixels in zip(sound, before, strict=True):
        again = decoded(decoding, data, "sound, after damaged ones")
        assert np.array_equal(again, pixels), "a damaged file left something in a decoder"


def test_other_formats_are_the_hosts(decoding: DeviceDecoding) -> None:
    counts = decoding.counts["host_format"]
    names = ("jpeg-cmyk", "mpo", "png-RGB", "webp-lossy", "tiff-jpeg", "gif-palette", "png-I;16")
    files = image_files.every_file()
    for name in names:
        here, there = (decode_rgb(files[name], LIMITS, decoding=one) for one in (decoding, None))
        assert torch.equal(here, there), name
    assert decoding.counts["host_format"] == counts + len(names)


# Threads and memory


@pytest.mark.whole_device
def test_threads_give_the_same_bits_and_device_memory_stays(device: torch.device) -> None:
    decoding = open_decoding("device", device)
    assert decoding is not None
    rng = np.random.default_rng()
    files = [
        jpeg(
            photograph(int(rng.integers(64, 700)), int(rng.integers(64, 900)), seed),
            progressive=seed % 3 == 0,
            subsampling=seed % 3,
        )
        for seed in range(64)
    ]
    alone = [sha256(decoded(decoding, data, "alone").tobytes()).hexdigest() for data in files]

    def digest(number: int) -> str:
        pixels = decode_rgb(files[number], LIMITS, decoding=decoding).numpy()
        return sha256(pixels.tobytes()).hexdigest()

    free_bytes = []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for round_ in range(24):
            order = rng.permutation(len(files)).tolist()
            for number, found in zip(order, pool.map(digest, order), strict=True):
                assert found == alone[number], f"file {number} in round {round_} is not what it was alone"
            torch.cuda.synchronize(device)
            free_bytes.append(torch.cuda.mem_get_info(device)[0])
    taken_mib = [(free_bytes[0] - free) // MIB for free in free_bytes]
    assert decoding.counts["device"] == 25 * len(files), decoding.counts
    # A picture that stayed each time would be over a gigabyte in the second half.
    assert taken_mib[-1] - taken_mib[11] <= 96, f"MiB taken since the first round, by round: {taken_mib}"


def decode_without_memory(data: bytes, expected_path: str) -> None:
    """In a process of its own: nothing of the library's pools is there yet."""
    device = torch.device("cuda", 0)
    decoding = open_decoding("device", device)
    assert decoding is not None
    torch.cuda.synchronize(device)
    held = []
    while (free_bytes := torch.cuda.mem_get_info(device)[0]) > 32 * MIB:
        held.append(torch.empty(free_bytes - 24 * MIB, dtype=torch.uint8, device=device))
    try:
        found = decode_rgb(data, LIMITS, decoding=decoding).numpy()
    finally:
        held.clear()
        torch.cuda.empty_cache()
    counts = decoding.counts
    assert counts["device"] == 0, f"47 MB of pixels fitted into {free_bytes} bytes: {counts}"
    assert counts["host_memory"] == 1, f"not recognised as want of memory: {counts}"
    expected = np.load(expected_path)
    assert np.array_equal(found, expected)
    check_near(decoded(decoding, data, "with memory again"), expected, HALF_CHROMA, "with memory again")


@pytest.mark.whole_device
def test_without_device_memory_the_host_decodes(device: torch.device, tmp_path: Path) -> None:
    data, path = jpeg(photograph(3500, 4500, 11)), str(tmp_path / "expected.npy")
    np.save(path, decode_rgb(data, LIMITS).numpy())
    process = multiprocessing.get_context("spawn").Process(target=decode_without_memory, args=(data, path))
    process.start()
    process.join(120)
    assert process.exitcode == 0


# Through the service


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_rows_of_a_service_are_near_the_hosts_under_other_keys(
    family: str, device: torch.device, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, "tiny", 3)
    files = [jpeg(photograph(200 + 61 * one, 640 - 43 * one, one), subsampling=one % 3) for one in range(8)]
    files.append(jpeg(photograph(300, 500, 9), exif=image_files.exif(6)))
    files.append(jpeg(photograph(300, 500, 10), progressive=True))
    files.append(image_files.encode(photograph(256, 320, 11), "PNG"))
    found: dict[str, list[EncodedRows]] = {}
    fingerprints: dict[str, bytes] = {}
    for name, decode, resize in (
        ("host", "host", "host"), ("decoded", "device", "host"), ("both", "device", "device"),
    ):  # fmt: skip
        with (
            running(tmp_path, device, tower="plain", decode=decode, resize=resize) as service,
            VisionEncoderClient(service.target) as client,
        ):
            fingerprints[name] = client.info().models[0].preprocess_fingerprint
            rows = list(client.encode([ImageItem(data) for data in files]))
            assert all(isinstance(one, EncodedRows) for one in rows), f"{name}: {rows}"
            found[name] = rows  # type: ignore[assignment]
            pipeline = service.service.pipeline
            assert pipeline is not None
            decoding = pipeline.model.preprocessor.decoding
            assert (decoding is None) == (decode == "host")
            if decoding is not None:
                counts = decoding.counts
                assert (counts["device"], counts["host_format"]) == (len(files) - 1, 1), f"{name}: {counts}"
    assert fingerprints["host"] != fingerprints["decoded"] == fingerprints["both"]
    for number, (host, decoded_, both) in enumerate(zip(*found.values(), strict=True)):
        assert host.key != decoded_.key == both.key, f"file {number}"
        assert host.grid_thw == decoded_.grid_thw == both.grid_thw, f"file {number}"
        expected = host.torch().cpu().double().flatten()
        for name, one in (("decoded", decoded_), ("both", both)):
            near = torch.nn.functional.cosine_similarity(
                one.torch().cpu().double().flatten(), expected, dim=0
            )
            print(f"file {number} {name}: cosine {float(near):.6f}")
            assert float(near) > 0.999, f"file {number} {name}: cosine {float(near):.6f}"
