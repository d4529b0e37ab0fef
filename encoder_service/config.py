"""The service's settings: parsed once, frozen; the only file that is read is ``--config``'s.

Owns every setting with its unit, bounds and meaning, the text of ``--help`` and of docs/settings.md, and the
answer to a wrong value. Only this file reads the environment (prefix ``VE_``).
What the device or the checkpoint reports belongs in run-time records, not here.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
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
    """The values of a comma list, from the environment or the command line. A file may have one number."""
    if isinstance(value, int):
        return (str(value),)
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


def arena_sizes(value: object) -> tuple[int, ...]:
    """``host bytes``, or ``host bytes+device bytes``. Raises ValueError."""
    parts = value.split("+") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    try:
        sizes = tuple(int(str(part)) for part in parts)
    except ValueError:
        sizes = ()
    if len(sizes) not in (1, 2) or min(sizes) < MIB:
        raise ValueError(f"{value!r} is neither host bytes nor host bytes+device bytes, at least {MIB} each")
    return sizes


def check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"{device!r} is none of auto, cpu, cuda and cuda:N")
    return device


def check_mode(mode: str) -> str:
    if not re.fullmatch(r"[0-7]{3}", mode):
        raise ValueError(f"{mode!r} is no mode of three octal digits, such as 660")
    return mode


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
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(
            f"{text!r} is no network such as 10.1.0.0/16, with zeros behind its prefix"
        ) from None


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
ArenaSizes = Annotated[tuple[int, ...], BeforeValidator(arena_sizes)]
IsolatedArenas = Annotated[dict[str, ArenaSizes], NoDecode, BeforeValidator(split_named_values)]


# The attention backends; ``towers.attention.available`` builds them.
AttentionName = Literal[
    "auto", "fa4", "fa4-192x128", "fa4-192x112r", "fa4-128x160r", "fa4-library", "fa3", "varlen", "sdpa"
]


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
    device: Annotated[str, AfterValidator(check_device)] = Field(
        AUTO,
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
    attention: AttentionName = Field(
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
    choices_seed: str = Field(
        "",
        description="Folder of an earlier choices_dir, in an image or on a volume, also read-only: what was "
        "kept for this device, driver and versions is copied to choices_dir at the start; empty: none.",
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
    http_listen: HttpAddress = Field(
        "", description="host:port for POST /v1/encode and its reference at /docs; empty: none."
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
        None,
        description="PEM authorities; when set, gRPC and HTTP clients present a certificate of one.",
    )
    admin_tls: bool = Field(False, description="The admin plane speaks TLS too, with the same certificate.")
    admin_token: SecretStr | None = Field(
        None,
        description="Token of the admin plane, safer in the environment than as an option; /healthz and "
        "/readyz need none. Not set: no token needed.",
    )
    tokens_file: Path | None = Field(
        None,
        description="Tokens of namespaces, for gRPC, HTTP and the broker: lines of name=token, read again "
        "when the file changes.",
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
    # Kimi-K3's largest image has 67,268.
    max_patches_per_item: int = Field(69_632, ge=4, description="Patches of the largest item.")
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
        description="Unix socket that hands out shared memory, an absolute path; auto: PORT.sock, or "
        "HOST-PORT.sock for one address of several, in $XDG_RUNTIME_DIR/vision-encoder, or in "
        "vision-encoder-UID of the temporary folder; empty: rows are sent inline.",
    )
    broker_mode: Annotated[str, AfterValidator(check_mode)] = Field(
        "660", description="Permissions of its socket, octal."
    )
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
        try:
            check_address(self.serve_tokenspeed)
            # Also ZMQ's address, which takes no names, and over RDMA the one that receivers connect to.
            host = ipaddress.ip_address(self.serve_tokenspeed.rpartition(":")[0].strip("[]"))
        except ValueError:
            raise ValueError(f"serve_tokenspeed is {self.serve_tokenspeed!r}, needs IP:port") from None
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


# By title: the first setting of each group, in the order of the class.
GROUPS = {
    "Tower": "model",
    "Processor": "transparent",
    "Addresses": "listen",
    "SGLang": "serve_sglang",
    "TokenSpeed": "serve_tokenspeed",
    "Security": "tls_cert",
    "Calls and connections": "max_calls",
    "Requests": "max_message_bytes",
    "Decoding": "ingest_threads",
    "Clips": "max_clip_bytes",
    "URLs": "url_allow",
    "Memory for rows": "arena_bytes",
    "Broker": "broker_path",
    "Pixels in shared memory": "shm_prefixes",
    "Operation": "drain_grace_s",
}


def parse_settings(*, config: object = None, **given: object) -> Settings:
    """Settings from keyword arguments over the environment over a file over defaults; ``None`` means not
    given. config: the path of a YAML file; by default the environment's VE_CONFIG.

    Raises ConfigurationError with one sentence that names every wrong setting where it was set, every
    environment variable with our prefix that names no setting, and every such key of the file.
    """
    variables = {variable_of(name): name for name in ("config", *Settings.model_fields)}
    sources = {name: option_of(name) for name, value in given.items() if value is not None}
    sources |= {name: text for text, name in variables.items() if text in os.environ and name not in sources}
    problems = [
        f"{text} is no setting{nearest(text, variables)}"
        for text in sorted(os.environ)
        if text.upper().startswith(ENV_PREFIX) and text not in variables
    ]
    file = str(config or os.environ.get(variable_of("config"), ""))
    in_file = read_file(file) if file else {}
    problems += [
        f"{file}: {key} is no setting{nearest(key, Settings.model_fields)}"
        for key in in_file
        if key not in Settings.model_fields
    ]
    problems += [
        f"{file}: {key} has no value: write '' for none, or leave the line out"
        for key, value in in_file.items()
        if value is None
    ]
    used = {
        name: value
        for name, value in in_file.items()
        if name in Settings.model_fields and name not in sources
    }
    sources |= {name: f"{file}: {name}" for name in used}
    used |= {name: value for name, value in given.items() if value is not None}
    try:
        if not problems:
            return Settings(**used)  # type: ignore[arg-type]
    except ValidationError as error:
        first = {str(problem["loc"][:1]): problem for problem in reversed(error.errors())}
        problems = [problem_text(problem, sources) for problem in reversed(first.values())]
    raise ConfigurationError("; ".join(problems))


def read_file(file: str) -> dict[str, object]:
    """The settings of a YAML file, by name; None for a line without a value. Raises ConfigurationError."""
    import yaml  # only here, since a start without a file does not need it

    try:
        text = Path(file).read_bytes()
        values, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"--config {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigurationError(f"--config {file}{line} is not YAML: {problem or 'no text'}") from None
    if not isinstance(values, Mapping | None):
        raise ConfigurationError(
            f"--config {file} holds a {type(values).__name__}, needs lines of name: value"
        )
    keys = [] if root is None else [str(key.value).replace("-", "_") for key, _ in root.value]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(f"--config {file} has several lines of {', '.join(sorted(repeated))}")
    return {str(key).replace("-", "_"): value for key, value in (values or {}).items()}


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as the end of a sentence."""
    known = list(known)
    close = [name.upper()] if name.upper() in known else difflib.get_close_matches(name, known, 1)
    return f", did you mean {close[0]}?" if close else ""


def problem_text(problem: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """One error of pydantic in words of ours: where the setting was set, its value unless it is secret, and
    what it needs. sources: where each setting was set."""
    path, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if not path:  # several settings, which the message names
        return str(message)
    name = str(path[0])
    source = sources.get(name, option_of(name))
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{name} is no setting{nearest(name, Settings.model_fields)}"
    if problem["type"] == "missing":
        return f"{source} is missing: a checkpoint's folder, or a hub id such as Qwen/Qwen3-VL-8B-Instruct"
    if problem["type"] == "value_error":
        return f"{source}: {message}"
    if problem["type"] == "too_short":
        return f"{source} is empty, needs at least one value"
    value = "" if SecretStr in get_args(field.annotation) else f" is {problem['input']!r},"
    quotes = " in quotes" if problem["type"] == "string_type" and value else ""
    return f"{source}{value} needs {settings_help()[name].needs}{quotes}"


@dataclass(frozen=True)
class SettingHelp:
    """What users read of one setting. value: what to write: a unit, the choices or a kind. needs: the same
    with bounds, as in an error. default: as text; empty if it is empty, None if the setting is required."""

    group: str
    value: str
    needs: str
    bounds: str
    default: str | None
    meaning: str
    is_flag: bool = False
    is_list: bool = False

    @property
    def text(self) -> str:
        """Meaning, bounds and default."""
        default = "required" if self.default is None else self.default and f"default {self.default}"
        facts = ", ".join(filter(None, (self.bounds, default)))
        return f"{self.meaning} ({facts})" if facts else self.meaning


@functools.cache
def settings_help() -> Mapping[str, SettingHelp]:
    """By name, in the order of the class."""
    starts = {name: title for title, name in GROUPS.items()}
    group, found = "", {}
    for name, field in Settings.model_json_schema()["properties"].items():
        group = starts.get(name, group)
        found[name] = setting_help(name, field, group)
    return found


def setting_help(name: str, field: Mapping[str, Any], group: str) -> SettingHelp:
    """field: its JSON schema."""
    # An optional setting's type and bounds are those of its first alternative; the second is null.
    schema = {**field, **next(iter(field.get("anyOf", ())), {})}
    kind, choices = schema["type"], schema.get("enum", ())
    units = [UNITS[word] for word in name.split("_") if word in UNITS]
    values = {"boolean": "flag", "array": "value,...", "object": "name=value,...", "string": "text"}
    value = (
        "|".join(choices) or schema.get("format") or values.get(kind) or (units[-1] if units else "number")
    )
    least, most = schema.get("minimum"), schema.get("maximum")
    bounds = "" if least is None else f"at least {least}" if most is None else f"{least} to {most}"
    unit = f" of {units[-1]}" if units else ""
    needs = {
        "boolean": "true or false",
        "integer": f"a whole number{unit}",
        "number": f"a number{unit}",
        "array": f"{'numbers' if schema.get('items') == {'type': 'integer'} else 'text'} in a comma list",
        "object": "name=value pairs in a comma list",
        "string": f"one of {', '.join(choices)}" if choices else "a path" if value == "path" else "text",
    }[kind]
    default = field.get("default")
    if "default" not in field:
        default_text = None
    elif isinstance(default, list):
        default_text = ",".join(map(str, default))
    else:
        text = str(default).lower() if kind == "boolean" else str(default)
        default_text = "" if default in (None, {}) else text
    return SettingHelp(
        group,
        value,
        f"{needs}, {bounds}" if bounds else needs,
        bounds,
        default_text,
        field["description"],
        kind == "boolean",
        kind in ("array", "object"),
    )
