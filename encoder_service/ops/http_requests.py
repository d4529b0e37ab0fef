"""What the HTTP applications of the service share: from a request's bytes to records, and errors as answers.

Pure, except for ``until_hang_up``. ``http_server`` bounds bodies, ``http_status`` owns the statuses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import math
import re
import reprlib
import socket
from collections.abc import Awaitable, Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from encoder_service.errors import (
    ClipTooLarge,
    ImageTooLarge,
    InvalidRequest,
    Unauthenticated,
    VisionEncoderError,
)
from encoder_service.ops.http_status import http_status
from encoder_service.types import Modality

Fields = TypeVar("Fields", bound=BaseModel)
Result = TypeVar("Result")

# Limit on the commas, lists and objects of a body, counted before it is parsed, because each becomes objects
# many times its size. A data URI has one comma.
MAX_JSON_MARKS = 65_536
# The percent escapes that occur in base64: of the characters of its alphabet that mean something in a URL.
ESCAPES = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "="}
# What a field needs, by pydantic's type of its error.
NEEDED = {
    "too_short": "needed is at least {min_length}",
    "too_long": "at most {max_length} are taken",
    "string_too_short": "needed is a text of at least {min_length} characters",
    "string_too_long": "needed is a text of at most {max_length} characters",
    "string_pattern_mismatch": "needed is a text like {pattern}",
    "string_unicode": "needed is text without lone surrogates",
    "value_error": "needed is text without lone surrogates",
    "string_type": "needed is a text",
    "int_type": "needed is a whole number",
    "float_type": "needed is a number",
    "finite_number": "needed is a finite number",
    "list_type": "needed is a list",
    "model_type": "needed is an object",
    "literal_error": "needed is {expected}",
    "greater_than_equal": "needed is at least {ge}",
    "less_than_equal": "needed is at most {le}",
    "less_than": "needed is less than {lt}",
}
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(?::\d{1,5})?")
# Kubernetes' and those that ICANN reserves for private use.
PRIVATE_DOMAINS = (".svc", ".svc.cluster.local", ".internal")
KNOWN_HOSTS = (
    "use its address, localhost, a name without a dot, or a name that ends in "
    f"{' or '.join(PRIVATE_DOMAINS)}; a proxy has to send one of these as Host"
)
# Limit on the invalid fields that an error message names.
MAX_NAMED_FIELDS = 4


def json_object(data: bytes) -> Mapping[str, object]:
    """The object of a request's body. Raises InvalidRequest."""
    value = json_value(data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is a {type(value).__name__}, needed is an object")
    return value


def json_value(data: bytes) -> object:
    """Raises InvalidRequest."""
    num_marks = sum(map(data.count, (b",", b"[", b"{")))
    if num_marks > MAX_JSON_MARKS:
        raise InvalidRequest(
            f"the body has {num_marks} commas and brackets, at most {MAX_JSON_MARKS} are taken"
        )
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{len(data)} bytes are no JSON") from None
    return value


def validated(fields: type[Fields], body: Mapping[str, object]) -> Fields:
    """Raises InvalidRequest, which names invalid fields with their values."""
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        invalid = [_problem(entry) for entry in error.errors()[:MAX_NAMED_FIELDS]]
        raise InvalidRequest("; ".join(invalid)) from None


def _problem(entry: Mapping[str, Any]) -> str:
    """One error of pydantic."""
    field, kind = ".".join(map(str, entry["loc"])) or "the body", entry["type"]
    if kind == "extra_forbidden":
        return f"{field} is no field here"
    if kind == "missing":
        return f"{field} is missing"
    if kind in ("too_short", "too_long"):
        num_entries = entry["ctx"]["actual_length"]
        return f"{field} has {num_entries} entries, " + NEEDED[kind].format(**entry["ctx"])
    needed = NEEDED.get(kind, "which is not taken").format(**entry.get("ctx", {}))
    return f"{field} is {reprlib.repr(entry['input'])}, {needed}"


def is_data_uri(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_uri_content(url: str, modality: Modality, max_bytes: int) -> bytes:
    """The bytes of a data URI in padded base64 without white space, whose media type is ignored. The content
    may have ESCAPES. modality, max_bytes: as for ``base64_content``. Raises InvalidRequest, ImageTooLarge,
    ClipTooLarge."""
    _, comma, text = url.partition(",")
    problem = "the data URI cannot be decoded: use a data URI in base64, padded, without white space"
    if not comma:
        raise InvalidRequest(problem)
    if "%" in text:
        least_bytes = (len(text) - 2 * text.count("%")) * 3 // 4 - 2
        check_file_size(modality, least_bytes, max_bytes)
        for escape, character in ESCAPES.items():
            text = text.replace(escape, character)
    return base64_content(text, modality, max_bytes, problem)


def base64_content(text: str, modality: Modality, max_bytes: int, problem: str) -> bytes:
    """The bytes of padded base64. A file above max_bytes is refused before it is decoded. problem: what the
    error for other text says. Raises InvalidRequest, ImageTooLarge, ClipTooLarge."""
    check_file_size(modality, decoded_size(text), max_bytes)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest(problem) from None


def decoded_size(text: str) -> int:
    """Bytes of padded base64 when decoded."""
    return len(text) * 3 // 4 - text[-2:].count("=")


def check_file_size(modality: Modality, num_bytes: int, max_bytes: int) -> None:
    """Raises ImageTooLarge, ClipTooLarge, as decoding the file would."""
    if num_bytes <= max_bytes:
        return
    error, what = (ClipTooLarge, "clip") if modality is Modality.VIDEO else (ImageTooLarge, "image")
    raise error(
        f"the {what} file has {num_bytes} bytes, the limit is {max_bytes}",
        found_bytes=num_bytes,
        max_encoded_bytes=max_bytes,
    )


def is_foreign(scheme: str, headers: Headers) -> bool:
    """Whether a browser states that a page of another origin sends this. Other clients send no origin.
    scheme: of the request."""
    origin = headers.get("origin")
    return origin is not None and origin.lower() != f"{scheme}://{headers.get('host', '')}".lower()


def own_names(listen_host: str) -> frozenset[str]:
    """The names of this host, for ``is_known_host``. listen_host: that of the server's address."""
    return frozenset((listen_host.lower(), socket.gethostname().lower()))


def is_known_host(host: str, own_names: Collection[str]) -> bool:
    """Whether a Host header names this service by a name that no page elsewhere can have. Otherwise the owner
    of a domain could let it point here, and its page would read what this answers (DNS rebinding).

    Such names are addresses, because then the browser was given the address; own_names; names without a dot
    and those of PRIVATE_DOMAINS, which public DNS does not have.
    """
    parts = HOST.fullmatch(host.lower())
    if parts is None:
        return False
    if parts["address"]:
        return True
    name = parts["name"].removesuffix(".")
    if "." not in name or name in own_names or name.endswith(PRIVATE_DOMAINS):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def peer_of(request: Request) -> str:
    """The caller's IP address. Raises InvalidRequest if the connection has none."""
    if request.client is None:
        raise InvalidRequest("the connection has no address")
    return request.client.host


async def until_hang_up(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled when the caller hangs up. Raises what it raises, and
    ClientDisconnect. The body has been read, so the next message is the end of the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def failure_fields(error: VisionEncoderError) -> dict[str, Any]:
    """An error as answers state it. status: the HTTP status of its class."""
    return {
        "status": http_status(error),
        "reason": error.reason,
        "message": error.message,
        "retryable": error.retryable,
        "retry_after_ms": error.retry_after_ms,
        "details": error.details,
    }


def error_response(failure: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that failed. failure: of ``failure_fields``. A retryable one says after how
    many seconds."""
    headers = dict(headers or {})
    if failure["retryable"]:
        headers["Retry-After"] = str(max(1, math.ceil(failure["retry_after_ms"] / 1e3)))
    if failure["reason"] == Unauthenticated.reason:
        headers["WWW-Authenticate"] = "Bearer"
    text = json.dumps({"error": dict(failure)})  # in ASCII, because a message may repeat lone surrogates
    return Response(text, failure["status"], headers, "application/json")
