"""The vocabulary of synthetic checkpoints: bytes, a few merges, and the family's special tokens.

Owns which token has which id. The ordinary tokens are the 256 byte symbols of byte-level BPE (GPT-2) and
256 merges of letter pairs, so that English takes about two letters per token and any generated id decodes.
Special tokens follow, in the order and with the gaps that the published vocabularies have.
"""

from __future__ import annotations

from dataclasses import dataclass

VOWELS = "aeiouy"
CONSONANTS = "bcdfghjklmnpqrstvwxz"
NUM_ORDINARY_TOKENS = 512
# Past the last special token, as published: an embedding has more rows than the tokenizer has tokens.
VOCAB_SIZE = 640


def byte_symbols() -> list[str]:
    """One printable character per byte, in byte order, as byte-level BPE writes them: printable Latin-1
    stands for itself, every other byte for the next code point from 256 on (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def merges() -> list[tuple[str, str]]:
    """256 merges in order of rank: consonant + vowel, vowel + consonant, then a space before either."""
    space = byte_symbols()[ord(" ")]
    pairs = [(first, second) for first in CONSONANTS for second in VOWELS[:5]]
    pairs += [(first, second) for first in VOWELS[:5] for second in CONSONANTS]
    pairs += [(space, letter) for letter in CONSONANTS + VOWELS]
    pairs += [(space, first + second) for first in "bcdfhlmnprstw" for second in "aeo"]
    return pairs[: NUM_ORDINARY_TOKENS - 256]


def ordinary_vocabulary() -> dict[str, int]:
    """Token to id: bytes first, then merges in order of rank."""
    tokens = byte_symbols() + [first + second for first, second in merges()]
    return {token: index for index, token in enumerate(tokens)}


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens with consecutive ids from NUM_ORDINARY_TOKENS on."""

    names: tuple[str, ...]

    def id_of(self, name: str) -> int:
        return NUM_ORDINARY_TOKENS + self.names.index(name)

    def ids(self) -> dict[str, int]:
        return {name: NUM_ORDINARY_TOKENS + index for index, name in enumerate(self.names)}


# The order of ids 151643 to 151656 of Qwen3-VL, and of 248044 to 248057 of Qwen3.5.
QWEN_TOKENS = SpecialTokens(
    (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
)
# The order of ids 163584 to 163605 of Kimi-K2.5, without the tool tokens.
KIMI_TOKENS = SpecialTokens(
    (
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "[EOT]",
        "<|im_system|>",
        "<|im_middle|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_end|>",
        "<|media_pad|>",
        "[UNK]",
        "[PAD]",
    )
)
