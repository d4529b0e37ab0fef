"""Ordinary chat requests into requests for a vLLM that consumes image rows, and failures back into answers.

Owns the form of both: which parts of a chat request are images, what takes their place, what a caller is told
when rows could not be had. Pure: no sockets, no server. ``vllm_front`` moves the bytes.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from lm_adapter import ImageItem, PreprocessOptions
from lm_adapter.engines.vllm_items import KeyedItem, transfer_params
from lm_adapter.errors import EncoderError, InvalidRequest, ItemFailed
from lm_adapter.items import UrlItem

__all__ = [
    "ChatImages",
    "Choices",
    "Failure",
    "choices_of",
    "failure_of",
    "images_of",
    "rewritten",
    "without_images",
]

IMAGE_PARTS = ("image_url", "input_image")
OTHER_MEDIA = ("video_url", "audio_url", "input_audio", "image_pil")
GRID_FIELDS = {"kimi_k25": "grid_thws"}
OPTION_NAMES = {field.name for field in fields(PreprocessOptions)}
MAX_URL_CHARS = 8192
_NO_URL_CHAR = re.compile(r"[^\x21-\x7e]|\\")
MAX_PIXELS = 2**64 - 1
MAX_COUNT = 2**32 - 1
"""That the wire carries, of pixels and of everything else that is counted."""
PORTION_CHARS = 1 << 20
"""Of base64, decoded at once: a multiple of four. Other threads go on in between."""

STATUS_OF_CODE = {
    3: 400,  # INVALID_ARGUMENT
    4: 504,  # DEADLINE_EXCEEDED
    5: 503,  # NOT_FOUND: the rows are gone
    8: 429,  # RESOURCE_EXHAUSTED
    9: 400,  # FAILED_PRECONDITION
    10: 503,  # ABORTED
    14: 503,  # UNAVAILABLE
    15: 502,  # DATA_LOSS: rows that do not fit
}
STATUS_OF_REASON = {
    "UNKNOWN_KEY": 503,
    "UNAVAILABLE": 503,
    "NO_ENDPOINTS": 503,
    "NOT_READY": 503,
    "DRAINING": 503,
    "VLLM_UNAVAILABLE": 503,
    "TRANSPORT_UNAVAILABLE": 503,
    "OVERLOADED": 429,
    "QUEUE_FULL": 429,
    "DEADLINE_EXCEEDED": 504,
    "INVALID_ROWS": 502,
    "INVALID_REQUEST": 400,
    "IDENTIFIER_REUSED": 400,
    "INVALID_TRANSFER_PARAMS": 400,
    "ROWS_TOO_LARGE": 400,
}
MAX_CHOICES = 16384
"""That vLLM answers one request with, where it is not told otherwise."""
AGAIN = ("UNKNOWN_KEY", "UNAVAILABLE", "NO_ENDPOINTS", "TRUNCATED_STREAM", "STALE_LEASE")
"""Reasons that a new encode can help against."""


@dataclass(frozen=True)
class ChatImages:
    """The images of one chat request: where they stand (message, part) and what they are."""

    places: tuple[tuple[int, int], ...]
    items: tuple[ImageItem | UrlItem, ...]


@dataclass(frozen=True)
class Failure:
    """Why image rows could not be had, for a caller. status: of HTTP."""

    status: int
    reason: str
    message: str
    retryable: bool = False
    retry_after_ms: int = 0

    @property
    def may_help_again(self) -> bool:
        return self.reason in AGAIN

    def body(self) -> dict[str, Any]:
        """In the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status == 400 else "vision_encoder_error"
        return {
            "error": {"message": self.message, "type": kind, "param": None, "code": self.reason},
            "vision_encoder": {"reason": self.reason, "retryable": self.retryable},
        }

    def headers(self) -> dict[str, str]:
        if not self.retryable and self.status not in (429, 503):
            return {}
        return {"retry-after": str(max(1, -(-self.retry_after_ms // 1000)))}

    @classmethod
    def of_account(cls, account: Mapping[str, Any]) -> Failure:
        """Of what the connector tells."""
        reason = str(account.get("reason", "INTERNAL"))
        return cls(
            STATUS_OF_REASON.get(reason, 502),
            reason,
            str(account.get("message", "image rows could not be had")),
            bool(account.get("retryable")),
            int(account.get("retry_after_ms", 0)),
        )


def failure_of(error: EncoderError) -> Failure:
    """Of an error that the adapter raised."""
    if isinstance(error, InvalidRequest):
        status = 400
    elif isinstance(error, ItemFailed):
        status = STATUS_OF_CODE.get(error.status, 502)
    else:
        status = STATUS_OF_REASON.get(error.reason, 502)
    return Failure(status, error.reason, error.message, error.retryable, error.retry_after_ms)


def images_of(body: Mapping[str, Any]) -> ChatImages:
    """The images of a chat request, in prompt order; those at an address are the service's to fetch, where it
    allows that. Raises InvalidRequest for broken URLs, for other media, for processor arguments that the
    service does not have, and for transfer parameters that the images' keys cannot stand beside."""
    options = _options(body.get("mm_processor_kwargs"))
    places: list[tuple[int, int]] = []
    items: list[ImageItem | UrlItem] = []
    messages = body.get("messages") or []
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages is a {type(messages).__name__}, needs a list")
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in OTHER_MEDIA:
                raise InvalidRequest(f"message {number} has a part {kind!r}, images go as image_url")
            if kind in IMAGE_PARTS:
                places.append((number, index))
                items.append(_item(part.get(kind), number, options))
    params = body.get("ec_transfer_params")
    if items and not isinstance(params, Mapping | None):
        raise InvalidRequest(f"ec_transfer_params is a {type(params).__name__}, needs an object")
    return ChatImages(tuple(places), tuple(items))


class Choices(NamedTuple):
    """How many answers a request asks for, and whether they begin with a part of its prompt."""

    number: int
    are_echoed: bool


def choices_of(body: Mapping[str, Any]) -> Choices:
    """What has no meaning is vLLM's to refuse, and counts as not said."""
    number = body.get("n")
    if type(number) is not int:
        number = 1
    return Choices(min(max(number, 1), MAX_CHOICES), bool(body.get("echo")))


def rewritten(
    body: Mapping[str, Any], images: ChatImages, rows: Sequence[KeyedItem], family: str, reply: str
) -> dict[str, Any]:
    """The request that vLLM gets: each image a grid and a name, the keys beside them. rows: of each image.
    Processor arguments were the encoder's: with them vLLM would rehash the names."""
    field = GRID_FIELDS.get(family, "image_grid_thw")
    parts: list[dict[str, Any]] = [
        {"type": "image_embeds", "image_embeds": {field: list(grid)}, "uuid": key.hex()} for key, grid in rows
    ]
    found = {name: value for name, value in body.items() if name != "mm_processor_kwargs"}
    transfer = {**(body.get("ec_transfer_params") or {}), **transfer_params(rows, reply)}
    return {**found, "messages": _placed(body, images, parts), "ec_transfer_params": transfer}


def without_images(body: dict[str, Any], images: ChatImages) -> dict[str, Any]:
    """The request with nothing in its images' places, for ``rewritten``: their bytes are ``images``'s."""
    if not images.items:
        return body
    return {**body, "messages": _placed(body, images, [{} for _ in images.items])}


def _placed(body: Mapping[str, Any], images: ChatImages, parts: Sequence[dict[str, Any]]) -> list[Any]:
    """The messages with these parts in the images' places, each in a copy of its own."""
    messages = list(body["messages"])
    for number in {number for number, _ in images.places}:
        messages[number] = {**messages[number], "content": list(messages[number]["content"])}
    for (number, index), part in zip(images.places, parts, strict=True):
        messages[number]["content"][index] = part
    return messages


def _item(value: object, number: int, options: PreprocessOptions) -> ImageItem | UrlItem:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise InvalidRequest(
            f"message {number} has an image whose url is a {type(url).__name__}, needs a text"
        )
    if not url.startswith("data:"):
        check_url(url)
        return UrlItem(url, options=options)
    header, comma, text = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidRequest(f"message {number} has a data: URL that is not base64")
    try:
        return ImageItem(_decoded(text), options=options)
    except ValueError as error:
        raise InvalidRequest(f"message {number} has a data: URL that is not base64: {error}") from error


def _decoded(text: str) -> bytes:
    """Raises ValueError for what is not base64."""
    if len(text) <= PORTION_CHARS:
        return base64.b64decode(text, validate=True)
    portions = []
    for start in range(0, len(text), PORTION_CHARS):
        portions.append(base64.b64decode(text[start : start + PORTION_CHARS], validate=True))
        if len(portions[-1]) != PORTION_CHARS // 4 * 3 and start + PORTION_CHARS < len(text):
            raise ValueError("there is padding before its end")
    return b"".join(portions)


def _options(arguments: object) -> PreprocessOptions:
    if arguments is None:
        return PreprocessOptions()
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"mm_processor_kwargs is a {type(arguments).__name__}, needs an object")
    unknown = sorted(set(arguments) - OPTION_NAMES)
    if unknown:
        raise InvalidRequest(f"mm_processor_kwargs has {unknown}, the encoder has {sorted(OPTION_NAMES)}")
    return PreprocessOptions(**{name: _option(name, value) for name, value in arguments.items()})


def _option(name: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "fps":
        if not is_number or not 0 < value <= sys.float_info.max:
            raise InvalidRequest(f"mm_processor_kwargs has fps {value!r:.80}, needs a number above 0")
        return float(value)
    most = MAX_PIXELS if name in ("min_pixels", "max_pixels") else MAX_COUNT
    if not is_number or not 1 <= value <= most or value != int(value):
        raise InvalidRequest(
            f"mm_processor_kwargs has {name} {value!r:.80}, needs a whole number of 1 to {most}"
        )
    return int(value)


def check_url(url: str) -> None:
    """The URL's form, before anything is asked of the encoder. Raises InvalidRequest with reason URL_REFUSED,
    which does not repeat the URL: it may contain secrets."""
    if len(url) > MAX_URL_CHARS:
        raise _refused(f"the URL has {len(url)} characters, at most {MAX_URL_CHARS} are taken")
    if (found := _NO_URL_CHAR.search(url)) is not None:
        raise _refused(f"the URL has {found[0]!r} at character {found.start()}, which no URL has: quote it")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("https", "http"):
        raise _refused("the URL does not begin with https:// or http://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not authority.partition(":")[0]:
        raise _refused("the URL names no host")
    if "@" in authority:
        raise _refused("the URL has a user in it, and no service sends one")


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="URL_REFUSED")
