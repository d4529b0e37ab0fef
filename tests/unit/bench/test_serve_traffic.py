"""What the serving bench sends: the mix's files, their schedule, the repeats."""

from __future__ import annotations

import io
import random
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import pytest
from PIL import Image
from serve_traffic import (
    BURST_CYCLE_S,
    BURST_FACTOR,
    BURST_PART,
    CHAT,
    HEAVY,
    Load,
    kinds_of,
    load_of,
    photos_in_turn,
    read_photos,
    stretched,
    with_comment,
    write_photos,
)


def any_seed() -> int:
    return random.randrange(1 << 31)


def test_every_process_derives_the_same_requests() -> None:
    load = Load(rate=200.0, duration_s=5.0, num_photos=7, seed=any_seed())
    assert load.requests() == load.requests()
    parts = [load.requests()[number::3] for number in range(3)]
    assert sorted(chain(*parts), key=lambda one: one.at_s) == load.requests()
    other = Load(rate=200.0, duration_s=5.0, num_photos=7, seed=load.seed + 1)
    assert other.requests() != load.requests()


@pytest.mark.parametrize("bursty", [False, True])
def test_arrivals_have_the_mean_rate_and_no_regular_gaps(bursty: bool) -> None:
    load = Load(rate=400.0, duration_s=20.0, num_photos=3, seed=any_seed(), bursty=bursty)
    times = [one.at_s for one in load.requests()]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < load.duration_s
    assert len(times) == pytest.approx(8000, abs=6 * 8000**0.5)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean > 0.9  # of a regular load 0, of a random one 1, of a bursty one more


def test_a_burst_has_its_part_of_the_time_and_its_factor() -> None:
    load = Load(rate=500.0, duration_s=40.0, num_photos=3, seed=any_seed(), bursty=True)
    requests = load.requests()
    in_burst = sum(one.at_s % BURST_CYCLE_S < BURST_PART * BURST_CYCLE_S for one in requests)
    assert in_burst / len(requests) == pytest.approx(BURST_PART * BURST_FACTOR, abs=0.03)


def test_stretching_keeps_order_and_whole_cycles() -> None:
    points = [stretched(number / 100) for number in range(500)]
    assert points == sorted(points)
    for cycles in range(4):
        assert stretched(cycles * BURST_CYCLE_S) == pytest.approx(cycles * BURST_CYCLE_S)


def test_repeats_follow_their_share_and_zipf() -> None:
    load = Load(rate=2000.0, duration_s=10.0, num_photos=5, seed=any_seed(), repeat_share=0.5, num_hot=50)
    requests = load.requests()
    hot = Counter(one.content for one in requests if one.content < load.num_hot)
    assert hot.total() / len(requests) == pytest.approx(0.5, abs=0.02)
    assert hot[0] / hot[1] == pytest.approx(2**load.zipf, rel=0.2)
    new = [one.content for one in requests if one.content >= load.num_hot]
    assert len(set(new)) == len(new)


def test_one_content_is_one_photograph() -> None:
    load = Load(rate=500.0, duration_s=5.0, num_photos=9, seed=any_seed(), repeat_share=0.6, num_hot=10)
    photos: dict[int, set[int]] = {}
    for request in load.requests():
        photos.setdefault(request.content, set()).add(request.photo)
    assert all(len(found) == 1 for found in photos.values())
    assert load_of(300.0, duration_s=5.0, num_photos=9, seed=load.seed).num_photos == 9


@pytest.mark.parametrize("repeat_share", [0.0, 0.3, 0.9])
def test_a_load_has_so_many_new_contents(repeat_share: float) -> None:
    load = load_of(200.0, duration_s=10.0, num_photos=4, seed=any_seed(), repeat_share=repeat_share)
    new = {one.content for one in load.requests()}
    assert len(new) / load.duration_s == pytest.approx(200.0, rel=0.1)


def test_photographs_take_turns() -> None:
    photos = photos_in_turn(6, random.Random())
    for _ in range(5):
        assert sorted(next(photos) for _ in range(6)) == list(range(6))


def test_chat_mix_has_its_shares_and_turned_phones(tmp_path: Path) -> None:
    seed = any_seed()
    kinds = kinds_of(CHAT, 100, scale=0.05, seed=seed)
    assert Counter(kind.name for kind in kinds) == {
        "phone photo": 30, "web image": 30, "thumbnail": 15, "screenshot": 15, "document page": 10,
    }  # fmt: skip
    assert kinds == kinds_of(CHAT, 100, scale=0.05, seed=seed)
    assert any(kind.turned for kind in kinds)
    assert any(kind.progressive for kind in kinds)
    written = write_photos(tmp_path / "photos", kinds, seed=seed, threads=2)
    files = read_photos(tmp_path / "photos")
    assert written == sum(map(len, files))
    for kind, data in zip(kinds, files, strict=True):
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (kind.width, kind.height)
            assert (image.getexif().get(0x0112) == 6) == kind.turned
            assert bool(image.info.get("progressive")) == kind.progressive


def test_a_comment_makes_other_bytes_of_the_same_picture(tmp_path: Path) -> None:
    kinds = kinds_of("224", 1, scale=0.2, seed=any_seed())
    write_photos(tmp_path / "photos", kinds, seed=1, threads=1)
    (data,) = read_photos(tmp_path / "photos")
    one, other = with_comment(data, 5, 1), with_comment(data, 5, 2)
    assert len({data, one, other, with_comment(data, 6, 1)}) == 4
    assert one == with_comment(data, 5, 1)
    pixels = [Image.open(io.BytesIO(file)).tobytes() for file in (data, one, other)]
    assert pixels[0] == pixels[1] == pixels[2]


@pytest.mark.parametrize("mix", sorted(HEAVY))
def test_heavy_mixes_are_mostly_of_their_size(mix: str) -> None:
    kinds = kinds_of(mix, 100, scale=1.0, seed=random.randrange(1000))
    assert len(kinds) == 100
    sides = Counter(kind.width for kind in kinds)
    (most, number), *others = sides.most_common()
    assert f"{most}-heavy" == mix
    assert number >= 80
    assert len(others) == 2
    assert all(kind.width == kind.height for kind in kinds)
    small = kinds_of(mix, 7, scale=0.25, seed=1)
    assert len(small) == 7
