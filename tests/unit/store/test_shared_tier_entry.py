"""The shared tier's entries: what is written is read, and nothing else is believed."""

from __future__ import annotations

import secrets

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.store.shared_tier_entry import (
    DTYPE_CODES,
    FIELDS,
    HEADER_BYTES,
    MAGIC,
    Seal,
    UnusableEntry,
    entry_header,
    open_entry,
    read_header,
    rows_view,
)
from encoder_service.types import EncodedItem, Grid

SECRET = secrets.token_bytes(32)


class Rows:
    """A model's layout."""

    def __init__(self, width: int = 12, dtype: torch.dtype = torch.bfloat16, levels: int = 2) -> None:
        self.width, self.dtype, self.num_deepstack_levels = width, dtype, levels

    def num_rows(self, grid: Grid) -> int:
        return grid.num_patches // 4


def make_item(num_rows: int = 5, dtype: torch.dtype = torch.bfloat16, width: int = 12) -> EncodedItem:
    rows = torch.randn(num_rows, width).to(dtype)
    grid = Grid(1, 2, 2 * num_rows)
    return EncodedItem(secrets.token_bytes(32), secrets.token_bytes(32), grid, rows, 2)


def entry_of(seal: Seal, name: bytes, item: EncodedItem) -> bytes:
    return entry_header(seal, name, item, 1_700_000_000_000) + bytes(rows_view(item.rows))


def opened(seal: Seal, name: bytes, key: bytes, data: bytes, layout: Rows | None = None) -> EncodedItem:
    header = read_header(data)
    header.check_layout(Rows() if layout is None else layout)
    return open_entry(seal, name, key, header, [memoryview(data)[HEADER_BYTES:]])


@settings(deadline=None)
@given(
    st.sampled_from(sorted(DTYPE_CODES, key=str)), st.integers(1, 40), st.integers(1, 9), st.integers(1, 700)
)
def test_rows_come_back_bit_for_bit_however_they_are_cut(
    dtype: torch.dtype, num_rows: int, width: int, piece_bytes: int
) -> None:
    item, seal = make_item(num_rows, dtype, width), Seal(SECRET)
    item.rows.view(torch.uint8).random_(0, 256)  # NaN and all: bytes are bytes
    name = seal.name("a", item.key)
    data = entry_of(seal, name, item)
    header = read_header(data)
    header.check_layout(Rows(width, dtype))
    body = memoryview(data)[HEADER_BYTES:]
    pieces = [body[at : at + piece_bytes] for at in range(0, len(body), piece_bytes)]
    found = open_entry(seal, name, item.key, header, pieces)
    assert (found.key, found.content_digest, found.grid) == (item.key, item.content_digest, item.grid)
    assert (found.num_deepstack_levels, found.rows.dtype) == (2, dtype)
    assert torch.equal(found.rows.view(torch.uint8), item.rows.view(torch.uint8))
    assert found.rows.untyped_storage().nbytes() == item.spec.num_bytes
    assert header.written_unix_ms == 1_700_000_000_000


def test_no_bit_of_an_entry_can_change_unnoticed() -> None:
    item, seal = make_item(2), Seal(SECRET)
    name = seal.name("a", item.key)
    data = entry_of(seal, name, item)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << secrets.randbelow(8)
        with pytest.raises(UnusableEntry):
            opened(seal, name, item.key, bytes(broken))


def test_an_entry_cut_short_or_with_more_behind_it_is_corrupt() -> None:
    item, seal = make_item(3), Seal(SECRET)
    name = seal.name("a", item.key)
    data = entry_of(seal, name, item)
    for broken in (data[:7], data[:HEADER_BYTES], data[:-1], data + b"\0"):
        with pytest.raises(UnusableEntry) as caught:
            opened(seal, name, item.key, broken)
        assert (caught.value.outcome, caught.value.is_ours) == ("corrupt", True)


def test_an_entry_in_anothers_place_is_corrupt() -> None:
    item, other, seal = make_item(), make_item(), Seal(SECRET)
    data = entry_of(seal, seal.name("a", item.key), item)
    for name in (seal.name("a", other.key), seal.name("b", item.key)):
        with pytest.raises(UnusableEntry, match="checksum"):
            opened(seal, name, other.key, data)


def test_p18_names_and_entries_need_the_secret() -> None:
    item, seal, stranger = make_item(), Seal(SECRET), Seal(secrets.token_bytes(32))
    assert seal.name("a", item.key) != stranger.name("a", item.key)
    assert seal.name("a", item.key) != seal.name("b", item.key)
    assert seal.name("a", b"b" + item.key) != seal.name("ab", item.key)
    name = seal.name("a", item.key)
    with pytest.raises(UnusableEntry, match="checksum"):
        opened(seal, name, item.key, entry_of(stranger, name, item))


def test_p22_rows_of_another_shape_are_never_used() -> None:
    item, seal = make_item(), Seal(SECRET)
    name = seal.name("a", item.key)
    data = entry_of(seal, name, item)
    assert opened(seal, name, item.key, data)
    for layout in (Rows(width=6), Rows(dtype=torch.float16), Rows(levels=1)):
        with pytest.raises(UnusableEntry) as caught:
            opened(seal, name, item.key, data, layout)
        assert caught.value.outcome == "corrupt"


def test_another_releases_entry_is_left_where_it_is() -> None:
    item, seal = make_item(), Seal(SECRET)
    name = seal.name("a", item.key)
    data = bytearray(entry_of(seal, name, item))
    data[32 + len(MAGIC)] += 1
    with pytest.raises(UnusableEntry) as caught:
        read_header(bytes(data))
    assert (caught.value.outcome, caught.value.is_ours) == ("foreign", False)
    assert FIELDS.size + 32 == HEADER_BYTES
