"""BLAKE3 from its paper, in plain Python: what digests are checked against, sharing no code with either side.

Owns the unkeyed hash with 32 bytes of output (BLAKE3, O'Connor, Aumasson, Neves, Wilcox-O'Hearn, section 2).
"""

from __future__ import annotations

import struct

IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS_THEN_DIAGONALS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
CHUNK_BYTES, BLOCK_BYTES, NUM_ROUNDS, MASK = 1024, 64, 7, 0xFFFFFFFF


def blake3_digest(data: bytes) -> bytes:
    """32 bytes."""
    return struct.pack("<8I", *_subtree(data, 0, ROOT))


def _subtree(data: bytes, first_chunk: int, root: int) -> tuple[int, ...]:
    """The chaining value of the chunks of ``data``, of which the first is number ``first_chunk``."""
    if len(data) <= CHUNK_BYTES:
        return _chunk(data, first_chunk, root)
    # The left subtree takes the largest power of two of whole chunks that leaves the right one a byte.
    left = CHUNK_BYTES
    while left * 2 < len(data):
        left *= 2
    children = _subtree(data[:left], first_chunk, 0)
    children += _subtree(data[left:], first_chunk + left // CHUNK_BYTES, 0)
    return _compress(IV, children, 0, BLOCK_BYTES, PARENT | root)


def _chunk(data: bytes, number: int, root: int) -> tuple[int, ...]:
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)] or [b""]
    value = IV
    for place, block in enumerate(blocks):
        flags = CHUNK_START if place == 0 else 0
        if place == len(blocks) - 1:
            flags |= CHUNK_END | root
        words = struct.unpack("<16I", block.ljust(BLOCK_BYTES, b"\0"))
        value = _compress(value, words, number, len(block), flags)
    return value


def _compress(
    value: tuple[int, ...], words: tuple[int, ...], counter: int, num_bytes: int, flags: int
) -> tuple[int, ...]:
    state = [*value, *IV[:4], counter & MASK, counter >> 32, num_bytes, flags]
    message = list(words)
    for _ in range(NUM_ROUNDS):
        for step, (a, b, c, d) in enumerate(COLUMNS_THEN_DIAGONALS):
            _mix(state, a, b, c, d, message[2 * step], message[2 * step + 1])
        message = [message[place] for place in PERMUTATION]
    return tuple(state[i] ^ state[i + 8] for i in range(8))


def _mix(state: list[int], a: int, b: int, c: int, d: int, first: int, second: int) -> None:
    for word, (turn_d, turn_b) in ((first, (16, 12)), (second, (8, 7))):
        state[a] = (state[a] + state[b] + word) & MASK
        state[d] = _turned(state[d] ^ state[a], turn_d)
        state[c] = (state[c] + state[d]) & MASK
        state[b] = _turned(state[b] ^ state[c], turn_b)


def _turned(word: int, by: int) -> int:
    return (word >> by | word << (32 - by)) & MASK
