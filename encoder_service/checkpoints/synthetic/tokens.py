"""The vocabulary of synthetic checkpoints: bytes, a few merges, and the family's special tokens.

Owns which token has which id, and the tokenizer's files. The ordinary tokens are the 256 byte symbols of
byte-level BPE (GPT-2) and 256 merges of letter pairs, so that English takes about one token per two letters
and any generated id can be decoded. Special tokens follow, in the order of the published vocabularies.
"""

from __future__ import annotations

from typing import Any

VOWELS = "aeiouy"
CONSONANTS = "bcdfghjklmnpqrstvwxz"
NUM_ORDINARY_TOKENS = 512


def byte_symbols() -> list[str]:
    """One printable character per byte, in byte order, as in byte-level BPE (GPT-2's table): printable
    Latin-1 characters represent themselves, every other byte is represented by the next code point from 256
    on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def merges() -> list[tuple[str, str]]:
    """256 merges by rank: consonant + vowel, vowel + consonant, space + letter, space + such a pair."""
    space = byte_symbols()[ord(" ")]
    pairs = [(first, second) for first in CONSONANTS for second in VOWELS[:5]]
    pairs += [(first, second) for first in VOWELS[:5] for second in CONSONANTS]
    pairs += [(space, letter) for letter in CONSONANTS + VOWELS]
    pairs += [(space, first + second) for first in "bcdfhlmnprstw" for second in "aeo"]
    return pairs[: NUM_ORDINARY_TOKENS - 256]


def ordinary_vocabulary() -> dict[str, int]:
    """Token to id: bytes first, then merges by rank."""
    tokens = byte_symbols() + [first + second for first, second in merges()]
    return {token: index for index, token in enumerate(tokens)}


# Names in the order of their ids, which begin at NUM_ORDINARY_TOKENS. Qwen3-VL has these at ids 151643 to
# 151656, Qwen3.5 at 248044 to 248057.
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Qwen3-Omni has these of audio besides, at ids 151669, 151670 and 151675.
OMNI_TOKENS = (*QWEN_TOKENS, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
# Kimi-K2.5 has these, and its tool tokens, at ids 163584 to 163605.
KIMI_TOKENS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>",
    "<|end_header_id|>", "[EOT]", "<|im_system|>", "<|im_middle|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip
# GLM-4.1V has these at ids 151329 to 151344.
GLM_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<|image|>", "<|video|>",
)  # fmt: skip

KIMI_VL_TOKENS = tuple("<|media_start|>" if name == "<|media_begin|>" else name for name in KIMI_TOKENS)

# Ling-3.0-VL has these among its ids from 156891 to 157161, the first ones and the image's in another order.
LING_TOKENS = (
    "<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<role>", "</role>", "<|role_end|>",
    "<|video_pad|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_start|>",
    "<|video_end|>",
)  # fmt: skip


def special_ids(names: tuple[str, ...]) -> dict[str, int]:
    """Special token to id."""
    return {name: index for index, name in enumerate(names, start=NUM_ORDINARY_TOKENS)}


def added_tokens_decoder(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The entry ``added_tokens_decoder`` of ``tokenizer_config.json``: id to token."""
    return {str(index): _added_token(name) for name, index in special_ids(names).items()}


def merges_text() -> str:
    """The text of ``merges.txt``."""
    return "".join(f"{line}\n" for line in ("#version: 0.2", *(" ".join(pair) for pair in merges())))


def tokenizer(names: tuple[str, ...]) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE: splits off words with their leading space, then merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index} | _added_token(name) for name, index in special_ids(names).items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ordinary_vocabulary(),
            "merges": [" ".join(pair) for pair in merges()],
        },
    }


def _added_token(name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": name, **flags, "special": True}
