"""The service's settings: parsed once, frozen, no I/O.

Owns every knob with its unit, bound and meaning. The environment (prefix ``VE_``) is read here and nowhere
else. What the device or the checkpoint tells goes into run-time records, never in here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from encoder_service.config_access import AccessSettings, named_values
from encoder_service.config_clips import ClipSettings
from encoder_service.config_shared_tier import SharedTierSettings
from encoder_service.errors import ConfigurationError

MIB = 1 << 20
GIB = 1 << 30
ENV_PREFIX = "VE_"
# What a message around one chunk of rows may take, rounded up.
CHUNK_OVERHEAD_BYTES = 64


class Settings(AccessSettings, ClipSettings, SharedTierSettings):
    """Settings of one service process. Sizes in bytes, times in the unit of the name."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True, protected_namespaces=()
    )

    model: Path = Field(description="Checkpoint directory in the hub's layout.")
    model_name: str = Field("", description="Name that requests use; empty: the directory's name.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="torch device of the tower.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type of weights and rows; default bfloat16 on a GPU, float32 on the CPU."
    )
    precision: Literal["dtype", "fp8"] = Field(
        "dtype", description="Of the blocks' matrix products: as dtype says, or fp8 on a GPU that has it."
    )
    tower: Literal["auto", "plain"] = Field(
        "auto", description="auto: fused kernels and CUDA graphs where the device can; plain: never."
    )
    attention: str = Field(
        "auto", description="Attention backend by name; auto: the fastest of those installed, by measuring."
    )
    deterministic: bool = Field(
        False, description="Only attention whose rows for an item do not depend on the rest of its batch."
    )
    bucket_sizes: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="Patches of each graph; empty: the default ladder."
    )
    listen: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1:50051",), min_length=1, description="gRPC addresses: host:port or unix:/path."
    )
    admin_listen: str = Field("127.0.0.1:8080", description="host:port of the admin plane; empty: none.")

    max_items_per_request: int = Field(256, ge=1, le=65536, description="Items in one Encode or Prefetch.")
    max_message_bytes: int = Field(256 * MIB, ge=MIB, le=2 * GIB - 1, description="Largest gRPC message.")
    max_encoded_bytes: int = Field(64 * MIB, ge=1024, description="Largest image file.")
    max_image_pixels: int = Field(64_000_000, ge=1, description="Largest decoded image, width times height.")
    max_patches_per_item: int = Field(65_536, ge=4, description="Largest item the tower is given.")
    max_patches_per_batch: int = Field(
        16_384, ge=4, description="Patches in one forward; a larger item runs alone."
    )
    max_items_per_batch: int = Field(64, ge=1, description="Items in one forward.")
    max_queued_patches: int = Field(524_288, ge=4, description="Admitted and not yet encoded; over it: full.")
    max_queued_bytes: int = Field(2 * GIB, ge=1024, description="Content bytes held for admitted items.")
    max_undelivered_bytes: int = Field(
        GIB, ge=MIB, description="Rows encoded and not yet read by their callers; over it: full."
    )
    ingest_threads: int = Field(
        0, ge=0, le=256, description="Worker threads that decode and resize; 0: one for each usable core."
    )
    decode: Literal["host", "device"] = Field(
        "host",
        description="Where JPEG files are decoded: the worker threads, or the GPU by nvJPEG, which needs the "
        "extra nvjpeg; pixels differ by a level, so keys do too.",
    )
    store_bytes: int = Field(2 * GIB, ge=0, description="Rows kept for later requests.")
    namespace_shares: Annotated[
        dict[str, Annotated[float, Field(ge=0.001, le=1000.0, allow_inf_nan=False)]], NoDecode
    ] = Field(
        {},
        description="Weights of namespaces' shares of the rows kept, to a thousandth: name=weight, comma "
        "separated; 1 for the others. Room that nobody claims is anybody's.",
    )
    broker_path: str = Field(
        "", description="Unix socket that hands out shared memory, an absolute path; empty: inline rows only."
    )
    arena_bytes: int = Field(
        GIB,
        ge=MIB,
        description="With a broker: shared host memory for rows, taken at start, in place of store_bytes.",
    )
    device_arena_bytes: int | None = Field(
        None,
        ge=0,
        description="With a broker: shared device memory for rows, beside arena_bytes; 0: none. Default: "
        "2 GiB on a GPU where it can be had.",
    )
    isolated_device_bytes: Annotated[dict[str, int], NoDecode] = Field(
        {},
        description="Device arenas of isolated namespaces: name=bytes, comma separated; those left out have "
        "their rows on the host only.",
    )
    isolated_namespaces: Annotated[dict[str, int], NoDecode] = Field(
        {}, description="Namespaces with an arena of their own: name=bytes, comma separated."
    )
    broker_open_namespaces: bool = Field(
        True, description="A namespace without a token is open to everyone who reaches the broker's socket."
    )
    broker_allowed_uids: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="User ids that may connect to the broker, comma separated; empty: any."
    )
    broker_mode: str = Field("660", pattern=r"^[0-7]{3}$", description="Permissions of its socket, octal.")
    broker_gid: int | None = Field(None, ge=0, description="Group of its socket; default: the process's.")
    local_calls: bool = Field(
        True,
        description="With a broker: calls are taken without gRPC too, at a socket beside the broker's, its "
        "path with .calls behind it. Clients that read shared memory use it by themselves.",
    )
    lease_default_ms: int = Field(30_000, ge=1, description="Of a lease whose caller does not say.")
    lease_limit_ms: int = Field(
        300_000, ge=1, le=86_400_000, description="The most that one grant or renewal gives."
    )
    lease_max_age_ms: int = Field(
        600_000, ge=1, le=86_400_000, description="The most that all renewals together make of one lease."
    )
    max_leases_per_client: int = Field(
        4096, ge=1, le=1_000_000, description="Of one connection to the broker; over it: inline rows."
    )
    max_published_bytes: int = Field(
        4 * GIB,
        ge=0,
        description="With a broker: pixels in memory that its clients publish, held at a time; 0: not taken.",
    )
    shm_prefixes: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="What names of shared memory segments with pixels begin with; empty: not taken."
    )
    shm_dir: Path = Field(Path("/dev/shm"), description="Folder of those segments.")  # noqa: S108
    shm_allowed_uids: Annotated[tuple[int, ...], NoDecode] = Field(
        (), description="User ids whose segments are taken, comma separated; empty: the service's own."
    )
    chunk_bytes: int = Field(MIB, ge=4096, le=16 * MIB, description="Rows in one message of a stream.")
    drain_grace_s: float = Field(
        20.0, ge=0, le=3600, description="In-flight work may take this long at stop."
    )
    event_loop: Literal["auto", "asyncio"] = Field(
        "asyncio", description="asyncio: the library's own; auto: uvloop's where it is installed."
    )
    torch_threads: int = Field(0, ge=0, le=1024, description="CPU threads of the tower; 0: torch's choice.")
    log_format: Literal["text", "json"] = Field("text", description="One line per event either way.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    traces: Literal["off", "otlp"] = Field(
        "off", description="otlp: spans by OTLP over gRPC as the OTEL_* variables say; needs the extra otel."
    )
    saturation_queue_s: float = Field(
        1.0, gt=0, le=3600, description="Queued device work that counts as saturated."
    )
    playground: bool = Field(False, description="The admin page encodes an image that is dropped on it.")

    @model_validator(mode="after")
    def check_limits_agree(self) -> Settings:
        """An item that one limit lets in must not be one that another can never admit: its callers would be
        told to retry forever."""
        for small, large in (
            ("max_patches_per_item", "max_queued_patches"),
            ("max_clip_patches", "max_queued_patches"),
            ("max_message_bytes", "max_queued_bytes"),
        ):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(
                    f"{small} {getattr(self, small)} is above {large} {getattr(self, large)}, "
                    "which could then never admit it"
                )
        if self.chunk_bytes + CHUNK_OVERHEAD_BYTES > self.max_message_bytes:
            raise ValueError(
                f"chunk_bytes {self.chunk_bytes} and its {CHUNK_OVERHEAD_BYTES} bytes of frame do not fit "
                f"into max_message_bytes {self.max_message_bytes}"
            )
        return self

    @model_validator(mode="after")
    def check_sharing(self) -> Settings:
        """An isolated namespace that everyone may enter is none; a time that a limit cuts is a trap."""
        if self.broker_path and not self.broker_path.startswith("/"):
            raise ValueError(f"broker_path {self.broker_path!r} is no absolute path")
        if self.isolated_namespaces and not self.broker_path:
            raise ValueError("isolated_namespaces are arenas that a broker hands out: set broker_path")
        for name, num_bytes in self.isolated_namespaces.items():
            if num_bytes < MIB:
                raise ValueError(f"isolated namespace {name!r} has {num_bytes} bytes, the least is {MIB}")
            if name not in self.namespace_tokens() and self.tokens_file is None:
                raise ValueError(f"isolated namespace {name!r} needs a token in tokens or tokens_file")
            if name in self.namespace_shares:
                raise ValueError(f"isolated namespace {name!r} has all of its arena and no share in another")
        if self.device_arena_bytes and not self.broker_path:
            raise ValueError("device_arena_bytes is memory that a broker hands out: set broker_path")
        if self.device_arena_bytes and self.device_arena_bytes < MIB:
            raise ValueError(f"device_arena_bytes is {self.device_arena_bytes}, the least is 0 or {MIB}")
        on_device_bytes = (self.device_arena_bytes or 0) + sum(self.isolated_device_bytes.values())
        if self.device == "cpu" and on_device_bytes:
            raise ValueError(f"{on_device_bytes} bytes of device arenas are a GPU's memory, device is cpu")
        for name, num_bytes in self.isolated_device_bytes.items():
            if name not in self.isolated_namespaces:
                raise ValueError(f"namespace {name!r} has a device arena of its own and is not isolated")
            if num_bytes < MIB:
                raise ValueError(f"namespace {name!r} has {num_bytes} device bytes, the least is {MIB}")
            if self.device_arena_bytes == 0:
                raise ValueError(f"namespace {name!r} has a device arena, device_arena_bytes is 0")
        if self.lease_default_ms > self.lease_limit_ms:
            raise ValueError(
                f"lease_default_ms {self.lease_default_ms} is above lease_limit_ms {self.lease_limit_ms}"
            )
        if self.lease_limit_ms > self.lease_max_age_ms:
            raise ValueError(
                f"lease_limit_ms {self.lease_limit_ms} is above lease_max_age_ms {self.lease_max_age_ms}"
            )
        return self

    @model_validator(mode="after")
    def check_segment_names(self) -> Settings:
        """A prefix that everything begins with lets callers name, and end, what is not theirs."""
        if not self.shm_dir.is_absolute():
            raise ValueError(f"shm_dir {str(self.shm_dir)!r} is no absolute path")
        for prefix in self.shm_prefixes:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{2,63}", prefix):
                raise ValueError(
                    f"shm_prefixes has {prefix!r}; a prefix has 3 to 64 letters, digits, '.', '_' and '-'"
                )
        return self

    @model_validator(mode="after")
    def check_fp8_has_its_path(self) -> Settings:
        """fp8 runs in the fused tower on a GPU with bfloat16 rows, and nowhere else."""
        if self.precision == "fp8":
            for name, needed, found in (
                ("device", "cuda", self.device.partition(":")[0]),
                ("tower", "auto", self.tower),
                ("dtype", "bfloat16", self.dtype or "bfloat16"),
            ):
                if found != needed:
                    raise ValueError(f"precision fp8 needs {name} {needed}, found {name} {found}")
        return self

    @model_validator(mode="after")
    def check_ingest_has_its_device(self) -> Settings:
        """What nothing can run on is refused, not replaced."""
        if self.decode == "device" and self.device == "cpu":
            raise ValueError("decode device needs device cuda, found device cpu")
        return self

    @field_validator("isolated_namespaces", "isolated_device_bytes", "namespace_shares", mode="before")
    @classmethod
    def split_by_name(cls, value: object) -> object:
        """``name=value`` pairs in a comma list; the default namespace's name is empty."""
        return named_values(value)

    @field_validator("bucket_sizes", "broker_allowed_uids", "shm_allowed_uids", "shm_prefixes", mode="before")
    @classmethod
    def split_list(cls, value: object) -> object:
        """A comma list is accepted from the environment and the command line."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()

    @field_validator("listen", mode="before")
    @classmethod
    def split_listen(cls, value: object) -> object:
        """A comma list is accepted from the environment."""
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("listen")
    @classmethod
    def check_listen(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            check_address(address)
        return value

    @field_validator("admin_listen")
    @classmethod
    def check_admin_listen(cls, value: str) -> str:
        if value:
            check_address(value)
            if value.startswith("unix:"):
                raise ValueError("the admin plane listens on host:port only")
        return value


def check_address(address: str) -> None:
    """Raises ValueError unless the address is ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        if len(address.encode()) - len("unix:") > 107:
            raise ValueError(f"{address!r}: a unix socket's path has at most 107 bytes")
        if address == "unix:":
            raise ValueError("'unix:' needs a path")
        return
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is neither host:port nor unix:/path")


def parse_settings(**given: object) -> Settings:
    """Settings from keyword arguments over the environment over defaults; ``None`` means not given.

    Raises ConfigurationError with one sentence that names every wrong setting, among them environment
    variables with our prefix that name no setting.
    """
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise ConfigurationError(f"invalid settings: unknown environment variable {', '.join(unknown)}")
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in entry['loc']) or 'settings'}: {entry['msg']}"
            for entry in error.errors()
        )
        raise ConfigurationError(f"invalid settings: {problems}") from None
