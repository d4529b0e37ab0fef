"""SGLang's own word for an image in a prompt's text, and the texts around images of Kimi-K3 and Ling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.kimi import k3_media_texts

SENTINEL = "<image>"
"""SGLang's own clients may write this for an image, instead of the model's placeholder."""


def with_placeholders(text: str, placeholder: str, image_text: str) -> str:
    """Replaces each sentinel with ``image_text``. A text that has the model's placeholder is not changed,
    because a sentinel in it is the user's own text."""
    return text if placeholder in text else text.replace(SENTINEL, image_text)


def with_line_breaks(
    ids: Sequence[int], placeholder_id: int, image_text: str, num_images: int, tokenizer: Any
) -> list[int]:
    """Ids of a prompt of Ling with a line break after each image, and its marks around it. The text is
    tokenised again, because line breaks merge. A prompt with a placeholder for each row is not changed."""
    if not num_images or ids.count(placeholder_id) != num_images:
        return list(ids)
    pattern = f"{re.escape(image_text)}|{re.escape(tokenizer.decode([placeholder_id]))}"
    text = re.sub(pattern, lambda _: f"{image_text}\n", tokenizer.decode(ids))
    return list(tokenizer.encode(text, add_special_tokens=False))


def with_image_sizes(
    ids: Sequence[int], images: Sequence[ImageFile], placeholder_id: int, tokenizer: Any
) -> list[int]:
    """Ids of a prompt of Kimi-K3 with the texts around each image, which have its size. Raises ValueError
    unless there is one placeholder for each image."""
    if (found := ids.count(placeholder_id)) != len(images):
        raise ValueError(f"the prompt has {found} placeholders of images, {len(images)} were sent")
    framed, remaining = list[int](), iter(images)
    for token_id in ids:
        if token_id != placeholder_id:
            framed.append(token_id)
            continue
        image = next(remaining)
        before, after = k3_media_texts(image.width, image.height)
        framed += [*_special_ids(tokenizer, before), token_id, *_special_ids(tokenizer, after)]
    return framed


def _special_ids(tokenizer: Any, text: str) -> list[int]:
    """Of a text with special tokens. The published tokenizer takes them for text unless they are allowed;
    others know no such argument."""
    try:
        return list(tokenizer.encode(text, allowed_special="all"))
    except TypeError:
        return list(tokenizer.encode(text, add_special_tokens=False))
