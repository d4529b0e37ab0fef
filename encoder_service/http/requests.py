"""The bodies of ``POST /v1/encode``: from JSON or multipart to the items of a call.

Owns the fields, which ``/docs`` shows with their descriptions, and the content of inline items. An item's
content, digest and options mean what they mean in the gRPC contract: ``RequestedItem.message`` is its message
there. ``parse_call`` decodes all inline items of a call, so that a caller has one job on a worker at most.
Pure: without I/O and without state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from encoder_service.errors import (
    BodyTooLarge,
    InvalidDigest,
    InvalidInput,
    InvalidRequest,
    UnsupportedContent,
    UnsupportedMediaType,
)
from encoder_service.ops.http_requests import (
    data_uri_content,
    is_data_uri,
    json_object,
    json_value,
    validated,
)
from encoder_service.rpc import convert
from encoder_service.types import Item, Modality
from vision_encoder.v1 import encoder_pb2 as pb

JSON_TYPE, MULTIPART_TYPE = b"application/json", b"multipart/form-data"
FILE_FIELDS = tuple(modality.value for modality in Modality)
TEXT_FIELDS = ("items", "namespace", "model")
# Limit on JSON, whose text takes up to twelve times its size while it is parsed. Forms have no such limit.
MAX_JSON_BYTES = 32 << 20
MAX_PARTS = convert.MAX_ITEMS_PER_REQUEST + len(TEXT_FIELDS)
# Characters of a file's name or of a wrong digest that an answer repeats.
SHOWN_CHARS = 200


def check_text(text: str) -> str:
    """Raises ValueError for lone surrogates, which JSON can state and nothing can encode."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(check_text)]
Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Uint64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class Record(BaseModel):
    """Unknown fields are refused: a misspelt one would be an option that has no effect."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Options(Record):
    """Preprocessing of one item; a field that is left out has the checkpoint's value. A field that the
    model's family does not have is refused."""

    min_pixels: Uint64 | None = Field(None, description="Qwen: smallest target area, in pixels.")
    max_pixels: Uint64 | None = Field(None, description="Qwen: largest target area, in pixels.")
    max_patches: Uint32 | None = Field(None, description="Kimi: patches of one image, before padding.")
    max_patches_per_side: Uint32 | None = Field(None, description="Kimi: patches of one side.")
    fps: float | None = Field(None, allow_inf_nan=False, description="Clips: frames sampled per second.")
    min_frames: Uint32 | None = Field(None, description="Clips: least number of frames sampled.")
    max_frames: Uint32 | None = Field(None, description="Clips: largest number of frames sampled.")


class FileItem(Record):
    """What a multipart body may state of one of its files."""

    content_digest: str = Field(
        "",
        description="64 hexadecimal digits. Identifies the content within the namespace and is not verified; "
        "left out: BLAKE3 of the content.",
    )
    options: Options = Options()


class JsonItem(FileItem):
    """One image or clip: a URL, or only the digest of content that the service has or is encoding."""

    modality: Literal["image", "video"] = "image"
    url: str | None = Field(
        None,
        description="`data:...;base64,...`, or `http(s)://...` where the service's address rules allow it. "
        "Left out: served by `content_digest` alone, or failed with `UNKNOWN_KEY`.",
    )


class EncodeBody(Record):
    """The body of a call in JSON."""

    items: list[JsonItem] = Field(
        min_length=1,
        max_length=convert.MAX_ITEMS_PER_REQUEST,
        examples=[[{"url": "data:image/png;base64,iVBORw0KGgo..."}]],
    )
    namespace: Text = Field("", description="Whose cached rows are used; empty: the default namespace.")
    model: Text = Field("", description="Empty: the service's only model.")


MULTIPART_SCHEMA = {
    "type": "object",
    "description": "Files in the order of the items; at least one.",
    "properties": {
        "image": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "Image files: JPEG, PNG, WebP, ...",
        },
        "video": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "Clips: MP4, WebM, MKV, GIF.",
        },
        "items": {
            "type": "string",
            "description": "JSON: a list with one object for each file, in their order; its fields are "
            "`content_digest` and `options`, as in the JSON body. Left out: none for any file.",
        },
        "namespace": {"type": "string", "description": "As in the JSON body."},
        "model": {"type": "string", "description": "As in the JSON body."},
    },
}


@dataclass(frozen=True)
class RequestedItem:
    """One item of a call. content: a file's bytes, a URL, None for the digest alone, or why it cannot be
    taken. name: of the file, for the answer."""

    modality: Modality
    content: bytes | str | InvalidInput | None
    content_digest: str = ""
    options: Options = field(default_factory=Options)
    name: str = ""

    @property
    def is_inline(self) -> bool:
        """Whether its content came with it."""
        return isinstance(self.content, bytes)

    def message(self) -> pb.Item:
        """The item in the gRPC contract, without inline content. Raises InvalidDigest, UnsupportedContent,
        InvalidRequest, ImageTooLarge, ClipTooLarge."""
        if isinstance(self.content, InvalidInput):
            raise self.content
        try:
            digest = bytes.fromhex(self.content_digest)
        except ValueError:
            raise InvalidDigest(
                f"content_digest is {self.content_digest[:SHOWN_CHARS]!r}, needed are 64 hexadecimal digits"
            ) from None
        message = pb.Item(
            modality=convert.MODALITY_NUMBERS[self.modality],
            content_digest=digest,
            options=pb.PreprocessOptions(**self.options.model_dump(exclude_none=True)),
        )
        if self.content is None:
            if not digest:
                raise InvalidRequest("the item has neither a url nor a content_digest")
            message.digest_only.SetInParent()
        elif self.is_inline:
            message.url = "data:"
        elif isinstance(self.content, str):
            if not self.content[:8].lower().startswith(("http://", "https://")):
                raise UnsupportedContent("the url is none of data:, http:// and https://")
            if not self.content.isascii():
                raise InvalidRequest("the url has characters outside of ASCII")
            message.url = self.content
        return message

    def inline(self) -> Item:
        """The item with its inline content. Raises as ``message`` and ``convert.item_from_proto``."""
        assert isinstance(self.content, bytes)
        return convert.item_from_proto(self.message(), fetched=self.content)


@dataclass(frozen=True)
class EncodeCall:
    items: Sequence[RequestedItem]
    namespace: str = ""
    model: str = ""


def parse_call(content_type: str, data: bytes, max_file_bytes: Mapping[Modality, int]) -> EncodeCall:
    """content_type: the request's header. max_file_bytes: of one image and of one clip. Raises
    InvalidRequest, BodyTooLarge, UnsupportedMediaType."""
    kind, options = parse_options_header(content_type)
    if kind == MULTIPART_TYPE:
        return _from_multipart(options.get(b"boundary", b""), data)
    if kind == JSON_TYPE:
        check_json_size("the JSON body", data)
        body = validated(EncodeBody, json_object(data))
        items = [_json_item(item, max_file_bytes[Modality(item.modality)]) for item in body.items]
        return EncodeCall(items, body.namespace, body.model)
    shown = content_type[:SHOWN_CHARS]
    raise UnsupportedMediaType(
        f"Content-Type is {shown!r}, taken are {JSON_TYPE.decode()} and {MULTIPART_TYPE.decode()}"
    )


def check_json_size(what: str, data: bytes) -> None:
    """Raises BodyTooLarge."""
    if len(data) > MAX_JSON_BYTES:
        raise BodyTooLarge(
            f"{what} has {len(data)} bytes, at most {MAX_JSON_BYTES} of JSON are taken; send large files as "
            f"{MULTIPART_TYPE.decode()}",
            found_bytes=len(data),
            max_bytes=MAX_JSON_BYTES,
        )


def _json_item(item: JsonItem, max_bytes: int) -> RequestedItem:
    modality = Modality(item.modality)
    content: bytes | str | InvalidInput | None = item.url
    if item.url is not None and is_data_uri(item.url):
        try:
            content = data_uri_content(item.url, modality, max_bytes)
        except InvalidInput as error:
            error.__context__ = None  # it refers to the whole text
            content = error.with_traceback(None)
    return RequestedItem(modality, content, item.content_digest, item.options)


def _from_multipart(boundary: bytes, data: bytes) -> EncodeCall:
    files: list[tuple[Modality, str, bytes]] = []
    texts: dict[str, bytes] = {}
    for part in parse_parts(boundary, data):
        if part.field in FILE_FIELDS:
            files.append((Modality(part.field), part.filename, part.content))
        elif part.field in TEXT_FIELDS and part.field not in texts:
            texts[part.field] = part.content
        else:
            problem = "comes twice" if part.field in TEXT_FIELDS else "is unknown"
            raise InvalidRequest(
                f"the field {part.field!r} {problem}; files are {' or '.join(FILE_FIELDS)}, texts are "
                f"{', '.join(TEXT_FIELDS)}"
            )
    check_json_size("the field items", texts.get("items", b""))
    stated = json_value(texts["items"]) if "items" in texts else [{}] * len(files)
    if not isinstance(stated, list) or len(stated) != len(files):
        found = f"{len(stated)} entries" if isinstance(stated, list) else f"a {type(stated).__name__}"
        raise InvalidRequest(
            f"the field items has {found}, needed is a list with one for each of {len(files)} files"
        )
    return EncodeCall(
        [
            RequestedItem(modality, content, item.content_digest, item.options, name)
            for (modality, name, content), item in zip(files, map(_file_item, stated), strict=True)
        ],
        _text(texts, "namespace"),
        _text(texts, "model"),
    )


def _file_item(value: object) -> FileItem:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"an entry of items is a {type(value).__name__}, needed is an object")
    return validated(FileItem, value)


def _text(texts: Mapping[str, bytes], name: str) -> str:
    try:
        return texts.get(name, b"").decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"the field {name} is no UTF-8") from None


@dataclass(frozen=True)
class Part:
    """One part of a multipart body. filename: as its sender states it, shortened."""

    field: str
    filename: str
    content: bytes


def parse_parts(boundary: bytes, data: bytes) -> list[Part]:
    """The parts of a multipart body. Raises InvalidRequest."""
    if not boundary:
        raise InvalidRequest("Content-Type multipart/form-data names no boundary")
    reader = _PartReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks)  # type: ignore[arg-type]
        parser.write(data)
    except FormParserError as error:
        raise InvalidRequest(f"the multipart body cannot be parsed: {error}") from None
    if not reader.is_complete:
        raise InvalidRequest(
            f"the multipart body of {len(data)} bytes does not end with its boundary: it is not whole, or "
            "Content-Type names another boundary"
        )
    return reader.parts


class _PartReader:
    """Collects what ``MultipartParser`` finds. is_complete: the closing boundary has come."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_complete = False
        self._header, self._value = b"", b""
        self._disposition = b""
        self._content: list[bytes] = []
        self.callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._name_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_content,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise InvalidRequest(
                f"the body has more than {MAX_PARTS} parts: at most {convert.MAX_ITEMS_PER_REQUEST} files "
                f"and {len(TEXT_FIELDS)} texts are taken"
            )
        self._disposition, self._content = b"", []

    def _name_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def _end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = (
            options.get(key, b"").decode(errors="replace")[:SHOWN_CHARS] for key in (b"name", b"filename")
        )
        self.parts.append(Part(name, filename, b"".join(self._content)))

    def _complete(self) -> None:
        self.is_complete = True
