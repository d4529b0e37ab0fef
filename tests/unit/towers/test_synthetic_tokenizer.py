"""The tokenizer of synthetic checkpoints, run by the tokenizers library: ids, merges, round trips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from encoder_service.towers.synthetic import FAMILIES, config_for, small_files
from encoder_service.towers.synthetic.tokens import VOCAB_SIZE, byte_symbols, merges, ordinary_vocabulary

TOKENIZERS = {
    family: Tokenizer.from_str(small_files(family, "tiny")["tokenizer.json"]) for family in FAMILIES
}


def test_the_byte_symbols_are_those_of_byte_level_bpe() -> None:
    assert sorted(byte_symbols()) == sorted(ByteLevel.alphabet())
    assert byte_symbols()[ord("A")] == "A"
    assert byte_symbols()[ord(" ")] == "Ġ"


def test_every_merge_joins_two_tokens_of_the_vocabulary_into_a_third() -> None:
    vocabulary = ordinary_vocabulary()
    assert len(merges()) == len(set(merges())) == 256
    assert len(vocabulary) == 512
    for first, second in merges():
        assert {first, second, first + second} <= set(vocabulary)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen3_vl",
            {
                "image_token_id": "<|image_pad|>",
                "video_token_id": "<|video_pad|>",
                "vision_start_token_id": "<|vision_start|>",
                "vision_end_token_id": "<|vision_end|>",
            },
        ),
        (
            "qwen3_5",
            {
                "image_token_id": "<|image_pad|>",
                "video_token_id": "<|video_pad|>",
                "vision_start_token_id": "<|vision_start|>",
                "vision_end_token_id": "<|vision_end|>",
            },
        ),
        (
            "kimi_k25",
            {
                "media_placeholder_token_id": "<|media_pad|>",
                "bos_token_id": "[BOS]",
                "eos_token_id": "[EOS]",
                "pad_token_id": "[PAD]",
            },
        ),
    ],
)
def test_special_tokens_have_the_ids_that_the_config_says(family: str, expected: dict[str, str]) -> None:
    config = config_for(family, "tiny")
    for field, token in expected.items():
        assert TOKENIZERS[family].token_to_id(token) == config[field]
        assert TOKENIZERS[family].encode(f"a{token}b").ids.count(config[field]) == 1
    assert TOKENIZERS[family].get_vocab_size() <= config["text_config"]["vocab_size"] == VOCAB_SIZE


def test_kimi_has_every_media_token() -> None:
    for token in ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"):
        assert len(TOKENIZERS["kimi_k25"].encode(token).ids) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_config_and_tokenizer_agree_on_special_tokens(family: str) -> None:
    listed = json.loads(small_files(family, "tiny")["tokenizer_config.json"])["added_tokens_decoder"]
    assert {int(index): token["content"] for index, token in listed.items()} == {
        index: token.content for index, token in TOKENIZERS[family].get_added_tokens_decoder().items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_text_round_trips(family: str, text: str) -> None:
    tokenizer = TOKENIZERS[family]
    normalized = tokenizer.normalizer.normalize_str(text)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == normalized


def test_english_takes_fewer_tokens_than_letters() -> None:
    text = "Describe the image in one sentence."
    assert len(TOKENIZERS["qwen3_vl"].encode(text).ids) < 0.75 * len(text)
