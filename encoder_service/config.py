"""The service's settings: parsed once, frozen, no I/O.

Owns every setting with its unit, bounds and meaning. Only this file reads the environment (prefix ``VE_``).
What the device or the checkpoint reports belongs in run-time records, not here.
"""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from encoder_service.errors import ConfigurationError

MIB = 1 << 20
GIB = 1 << 30
ENV_PREFIX = "VE_"
MAX_UNIX_PATH_BYTES = 107
AUTO = "auto"
# Of a number, by a word of its setting's name.
UNITS = {"bytes": "bytes", "s": "seconds", "patches": "patches", "pixels": "pixels"}


def split_list(value: object) -> object:
    """The values of a comma list, from the environment or the command line."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",")) if value.strip() else ()


def split_named_values(value: object) -> object:
    """``name=value`` pairs of a comma list; the default namespace's name is empty."""
    if not isinstance(value, str):
        return value
    found: dict[str, str] = {}
    for part in filter(None, value.split(",")):
        name, separator, text = part.partition("=")
        if not separator or not text or name.strip() in found:
            raise ValueError(f"{name.strip()!r} is not one name=value of a comma list")
        found[name.strip()] = text.strip()
    return found


def split_sizes(value: object) -> object:
    """``host bytes``, or ``host bytes+device bytes``."""
    return value.split("+") if isinstance(value, str) else value


def check_address(address: str) -> str:
    """Raises ValueError unless the address is ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        if len(address.encode()) - len("unix:") > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"{address!r}: a unix socket's path has at most {MAX_UNIX_PATH_BYTES} bytes")
        if address == "unix:":
            raise ValueError("'unix:' needs a path")
        return address
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is neither host:port nor unix:/path")
    return address


def check_http_address(address: str) -> str:
    if address.startswith("unix:"):
        raise ValueError("HTTP listens on host:port only")
    return check_address(address) if address else ""


def check_http_url(url: str) -> str:
    if url and not re.fullmatch(r"https?://[A-Za-z0-9._\[\]:-]+", url):
        raise ValueError(f"{url!r} is not http://host:port")
    _ = urllib.parse.urlsplit(url).port  # ValueError for no number, and above 65535
    return url


def check_network(text: str) -> str:
    return str(ipaddress.ip_network(text))


HttpAddress = Annotated[str, AfterValidator(check_http_address)]
HttpUrl = Annotated[str, AfterValidator(check_http_url)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
Addresses = Annotated[
    tuple[Annotated[str, AfterValidator(check_address)], ...], NoDecode, BeforeValidator(split_list)
]
HttpUrls = Annotated[tuple[HttpUrl, ...], NoDecode, BeforeValidator(split_list)]
Networks = Annotated[
    tuple[Annotated[str, AfterValidator(check_network)], ...], NoDecode, BeforeValidator(split_list)
]
Numbers = Annotated[tuple[int, ...], NoDecode, BeforeValidator(split_list)]
ArenaSizes = Annotated[
    tuple[Annotated[int, Field(ge=MIB)], ...], Field(max_length=2), BeforeValidator(split_sizes)
]
IsolatedArenas = Annotated[dict[str, ArenaSizes], NoDecode, BeforeValidator(split_named_values)]


def keep_dot(value: object) -> object:
    """A path that begins with a dot is a folder's and never a hub id. It is made absolute, since Path drops
    the dot."""
    return Path(value).absolute() if isinstance(value, str) and value.startswith(".") else value


class Settings(BaseSettings):
    """Settings of one service process. Sizes are in bytes, times in the unit of the name."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True, protected_namespaces=()
    )

    # -- tower -----------------------------------------------------------------------------------------
    model: Annotated[Path, BeforeValidator(keep_dot)] = Field(
        description="Checkpoint folder in the hub's layout, or a hub id: ORG/NAME or ORG/NAME@REVISION."
    )
    model_name: str = Field(
        "", description="Name that requests use; empty: the folder's name, or NAME of a hub id."
    )
    device: str = Field(
        AUTO,
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device of the tower: cpu, cuda or cuda:N; auto: the first GPU, without one the CPU.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of weights and rows; auto: the checkpoint's, or bfloat16 for one in float32, as "
        "vLLM's auto.",
    )
    tower: Literal["auto", "plain"] = Field(
        "auto",
        description="auto: fused kernels and CUDA graphs where the device supports them; plain: never.",
    )
    attention: str = Field(
        "auto", description="Attention backend by name; auto: measures the installed ones, takes the fastest."
    )
    deterministic: bool = Field(
        False, description="Only attention whose rows for an item do not depend on the rest of its batch."
    )
    choices_dir: str = Field(
        "~/.cache/vision-encoder",
        description="Folder for the kernels that a start on a GPU measured as fastest, which later starts on "
        "the same device, driver and versions use without measuring; empty: none.",
    )
    bucket_sizes: Numbers = Field((), description="Patches of each graph; empty: the default ladder.")
    torch_threads: int = Field(0, ge=0, le=1024, description="CPU threads of the tower; 0: torch's choice.")

    # -- processor -------------------------------------------------------------------------------------
    transparent: Literal["white", "drop"] = Field(
        "white",
        description="Alpha of images and clips: white composites it over white, as the reference's current "
        "processors and vLLM do; drop removes the alpha channel, as older ones and SGLang do.",
    )

    # -- addresses -------------------------------------------------------------------------------------
    listen: Addresses = Field(
        ("127.0.0.1:50051",), min_length=1, description="gRPC addresses: host:port or unix:/path."
    )
    admin_listen: HttpAddress = Field(
        "127.0.0.1:8080", description="host:port of the admin plane; empty: none."
    )
    playground: bool = Field(False, description="The admin page encodes an image that is dropped on it.")

    # -- SGLang ----------------------------------------------------------------------------------------
    serve_sglang: HttpAddress = Field(
        "",
        description="host:port for SGLang's own encoder protocol, without tokens; empty: none.",
    )
    sglang_receivers: Networks = Field(
        (),
        description="Networks that rows may be sent to besides the requests' own hosts: 10.1.0.0/16, ...",
    )
    sglang_register: HttpUrls = Field(
        (), description="SGLang's bootstrap servers that list the service: http://host:port, ..."
    )
    sglang_url: HttpUrl = Field("", description="The service's URL in these lists: http://host:port.")

    # -- TokenSpeed ------------------------------------------------------------------------------------
    serve_tokenspeed: str = Field(
        "",
        description="IP:port for SMG gateways, as TokenSpeed's encode worker, without tokens; empty: none.",
    )
    tokenspeed_bootstrap_port: int = Field(
        8998,
        ge=0,
        le=65534,
        description="Port of the same address where prefill workers find the service; at the next one they "
        "name their memory; 0: any two.",
    )
    tokenspeed_receivers: Networks = Field(
        (), description="Networks that rows may be sent to besides the prefill workers' own: 10.1.0.0/16, ..."
    )
    tokenspeed_send_bytes: int = Field(
        256 * MIB, ge=MIB, description="Buffer for rows that are being sent; the largest item has to fit."
    )
    tokenspeed_rdma: str = Field(
        "", description="RDMA devices for rows, comma separated, or auto for Mooncake's choice; empty: TCP."
    )

    # -- security --------------------------------------------------------------------------------------
    tls_cert: Path | None = Field(
        None, description="PEM chain of the service; with tls_key, host:port addresses speak TLS only."
    )
    tls_key: Path | None = Field(None, description="PEM key of tls_cert, not encrypted.")
    tls_client_ca: Path | None = Field(
        None, description="PEM authorities; when set, gRPC clients must present a certificate signed by one."
    )
    admin_tls: bool = Field(False, description="The admin plane speaks TLS too, with the same certificate.")
    admin_token: SecretStr | None = Field(
        None,
        description="Token of the admin plane, safer in the environment than as an option; /healthz and "
        "/readyz need none. Not set: no token needed.",
    )
    tokens_file: Path | None = Field(
        None,
        description="Tokens of namespaces, for gRPC and the broker: lines of name=token, read again when the "
        "file changes.",
    )
    open_namespaces: bool = Field(True, description="A namespace without a token is open to every caller.")

    reflection: bool = Field(
        True, description="gRPC reflection answers; where every namespace has a token, to callers with one."
    )

    # -- calls and connections -------------------------------------------------------------------------
    max_calls: int = Field(4096, ge=1, le=1_000_000, description="Calls in progress; more are refused.")
    max_connections: int = Field(1024, ge=1, le=1_000_000, description="TCP connections on one address.")
    connection_age_s: float = Field(
        0.0,
        ge=0,
        le=604_800,
        description="A connection closes at this age, after its calls; 0: never. With TLS, certificates take "
        "effect on new connections only.",
    )

    # -- requests --------------------------------------------------------------------------------------
    max_message_bytes: int = Field(256 * MIB, ge=MIB, le=2 * GIB - 1, description="Largest gRPC message.")
    max_encoded_bytes: int = Field(64 * MIB, ge=1024, description="Largest image file.")
    max_image_pixels: int = Field(
        64_000_000, ge=1, description="Largest decoded image or frame of a clip, width times height."
    )
    max_patches_per_item: int = Field(65_536, ge=4, description="Patches of the largest item.")
    max_patches_per_batch: int = Field(
        16_384, ge=4, description="Patches in one forward; a larger item runs alone."
    )
    max_queued_patches: int = Field(
        524_288, ge=4, description="Patches admitted and not yet encoded; more are refused."
    )
    max_queued_bytes: int = Field(2 * GIB, ge=1024, description="Content bytes held for admitted items.")
    max_undelivered_bytes: int = Field(
        GIB, ge=MIB, description="Rows encoded and not yet read by their callers; above it no encode starts."
    )

    # -- ingest ----------------------------------------------------------------------------------------
    ingest_threads: int = Field(
        0, ge=0, le=256, description="Worker threads that decode and resize; 0: one for each usable core."
    )
    max_decoded_bytes: int = Field(
        GIB,
        ge=MIB,
        description="Memory for the pixels of images and clips that are being decoded; others wait.",
    )

    # -- clips -----------------------------------------------------------------------------------------
    max_clip_bytes: int = Field(256 * MIB, ge=1024, description="Largest clip file.")
    max_clip_decoded_pixels: int = Field(
        250_000_000_000,
        ge=1,
        description="Pixels of all decoded frames of a clip, sampled or not; an hour of 1920x1080 at 30 "
        "frames a second has 2.2e11.",
    )
    max_clip_patches: int = Field(262_144, ge=4, description="Patches of all frames sampled from one clip.")

    # -- URLs ------------------------------------------------------------------------------------------
    url_allow: Names = Field(
        (),
        description="Allowed URLs: host, *.domain or host:port, with an optional "
        "http:// in front; comma separated; empty: URL items are refused.",
    )
    url_networks: Networks = Field(
        (), description="Networks that are not public and that URLs may resolve to: 10.1.0.0/16, ..."
    )

    # -- memory ----------------------------------------------------------------------------------------
    arena_bytes: int = Field(
        2 * GIB,
        ge=MIB,
        description="Host memory of the rows kept; with a broker shared, and taken at start.",
    )
    device_arena_bytes: int | None = Field(
        None,
        ge=0,
        description="With a broker: shared device memory of the rows kept; 0: none. Default: 2 GiB on a GPU "
        "that has the room.",
    )
    isolated_namespaces: IsolatedArenas = Field(
        {},
        description="Namespaces with arenas of their own: name=host bytes or name=host bytes+device bytes, "
        "comma separated.",
    )

    # -- broker ----------------------------------------------------------------------------------------
    broker_path: str = Field(
        AUTO,
        description="Unix socket that hands out shared memory, an absolute path; auto: PORT.sock in "
        "$XDG_RUNTIME_DIR/vision-encoder, or in vision-encoder-UID of the temporary folder; empty: rows are "
        "sent inline.",
    )
    broker_mode: str = Field("660", pattern=r"^[0-7]{3}$", description="Permissions of its socket, octal.")
    broker_allowed_uids: Numbers = Field(
        (), description="User ids that may connect to the broker, comma separated; empty: any."
    )

    # -- pixels in shared memory -----------------------------------------------------------------------
    shm_prefixes: Names = Field(
        (), description="Prefixes of the names of shared-memory segments with pixels; empty: refused."
    )
    shm_allowed_uids: Numbers = Field(
        (), description="Owners of accepted segments, by user id, comma separated; empty: the service's own."
    )

    # -- operation -------------------------------------------------------------------------------------
    drain_grace_s: float = Field(20.0, ge=0, le=3600, description="Time for in-flight work at stop.")
    log_format: Literal["text", "json"] = Field("text", description="One line per event either way.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    traces: Literal["off", "otlp"] = Field(
        "off", description="otlp: spans by OTLP over gRPC, set up by the OTEL_* variables; needs extra otel."
    )

    @model_validator(mode="after")
    def check_limits_agree(self) -> Settings:
        """An item within one limit must not exceed another one forever: its callers would retry in vain."""
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
        return self

    @model_validator(mode="after")
    def check_security(self) -> Settings:
        """Settings that protect only together are set together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are set together or not at all")
        for name in ("tls_client_ca", "admin_tls"):
            if getattr(self, name) and self.tls_cert is None:
                raise ValueError(f"{name} needs tls_cert and tls_key")
        if self.admin_token is not None and not self.admin_token.get_secret_value():
            raise ValueError("admin_token is empty")
        for prefix in self.shm_prefixes:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{2,63}", prefix):
                raise ValueError(
                    f"shm_prefixes has {prefix!r}; a prefix has 3 to 64 letters, digits, '.', '_' and '-'"
                )
        return self

    @model_validator(mode="after")
    def check_sglang(self) -> Settings:
        if self.sglang_register and not (self.serve_sglang and self.sglang_url):
            raise ValueError("sglang_register needs serve_sglang, and sglang_url to tell SGLang's servers")
        return self

    @model_validator(mode="after")
    def check_tokenspeed(self) -> Settings:
        if not self.serve_tokenspeed:
            return self
        check_address(self.serve_tokenspeed)
        # Also ZMQ's address, which takes no names, and over RDMA the one that receivers connect to.
        host = ipaddress.ip_address(self.serve_tokenspeed.rpartition(":")[0].strip("[]"))
        if host.version == 6:
            raise ValueError(
                f"serve_tokenspeed needs an IPv4 address, which prefill workers can use, not {host}"
            )
        if self.tokenspeed_rdma and host.is_unspecified:
            raise ValueError(f"with tokenspeed_rdma, serve_tokenspeed is the host's own address, not {host}")
        return self

    @model_validator(mode="after")
    def check_arenas(self) -> Settings:
        if self.broker_path and self.broker_path != AUTO:
            check_address(f"unix:{self.broker_path}")
            if not self.broker_path.startswith("/"):
                raise ValueError(f"broker_path {self.broker_path!r} is no absolute path")
        if not self.broker_path:
            for name in ("isolated_namespaces", "device_arena_bytes"):
                if getattr(self, name):
                    raise ValueError(f"{name} is memory that a broker hands out: set broker_path")
        if self.isolated_namespaces and self.tokens_file is None:
            raise ValueError("isolated_namespaces need tokens: set tokens_file")
        if self.device_arena_bytes and self.device_arena_bytes < MIB:
            raise ValueError(f"device_arena_bytes is {self.device_arena_bytes}, the least is 0 or {MIB}")
        if self.device == "cpu" and self.num_device_bytes:
            raise ValueError(
                f"{self.num_device_bytes} bytes of device arenas are a GPU's memory, device is cpu"
            )
        if self.num_device_bytes and self.device_arena_bytes == 0:
            raise ValueError("isolated_namespaces have device arenas, device_arena_bytes is 0")
        return self

    @property
    def num_device_bytes(self) -> int:
        """Of all device arenas that the settings require."""
        isolated_bytes = sum(sum(sizes[1:]) for sizes in self.isolated_namespaces.values())
        return (self.device_arena_bytes or 0) + isolated_bytes


def parse_settings(**given: object) -> Settings:
    """Settings from keyword arguments over the environment over defaults; ``None`` means not given.

    Raises ConfigurationError with one sentence that names every wrong setting, and every environment variable
    with our prefix that names no setting.
    """
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise ConfigurationError(f"invalid settings: unknown environment variable {', '.join(unknown)}")
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(problem_text(problem) for problem in error.errors())
        raise ConfigurationError(f"invalid settings: {problems}") from None


def problem_text(problem: Mapping[str, Any]) -> str:
    """One error of pydantic with the setting's names, and with its value unless the message has it or the
    value is secret."""
    path, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    field = Settings.model_fields.get(str(path[0])) if path else None
    text = ".".join(map(str, path))
    if field is None:  # several settings, or an unknown one
        return f"{text}: {message}" if text else message
    if problem["type"] not in ("missing", "value_error") and SecretStr not in get_args(field.annotation):
        text += f" is {problem['input']!r}"
    name = str(path[0])
    return f"{text} (--{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()}): {message}"


@dataclass(frozen=True)
class SettingHelp:
    """value: what to write: a unit, the choices or a kind. text: meaning, bounds and default."""

    value: str
    text: str
    is_flag: bool = False
    is_list: bool = False


def settings_help() -> dict[str, SettingHelp]:
    """By name, in the order of the class."""
    return {
        name: setting_help(name, field) for name, field in Settings.model_json_schema()["properties"].items()
    }


def setting_help(name: str, field: Mapping[str, Any]) -> SettingHelp:
    """field: its JSON schema."""
    # An optional setting's type and bounds are those of its first alternative; the second is null.
    schema = {**field, **next(iter(field.get("anyOf", ())), {})}
    kinds = {"boolean": "flag", "array": "value,...", "object": "name=value,...", "string": "text"}
    units = [UNITS[word] for word in name.split("_") if word in UNITS]
    value = kinds.get(schema["type"]) or (units[-1] if units else "number")
    value = "|".join(schema.get("enum", ())) or schema.get("format") or value
    least, most, default = (schema.get(key) for key in ("minimum", "maximum", "default"))
    facts = [] if least is None else [f"at least {least}" if most is None else f"{least} to {most}"]
    if "default" not in schema:
        facts.append("required")
    elif isinstance(default, list) and default:
        facts.append(f"default {','.join(default)}")
    elif default not in (None, "", [], {}):
        facts.append(f"default {str(default).lower()}")
    text = f"{field['description']} ({', '.join(facts)})" if facts else field["description"]
    return SettingHelp(value, text, schema["type"] == "boolean", schema["type"] in ("array", "object"))
