"""What the value ``auto`` of a setting means on this host: the device, and the broker's socket.

Owns finding a GPU, the reason why torch cannot use one, and a folder for the socket that only the service's
user may enter. The checkpoint's dtype is read in ``startup``, with the checkpoint. Without ``with_device``
torch is not imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import structlog

from encoder_service.config import AUTO, Settings, check_address
from encoder_service.errors import ConfigurationError
from encoder_service.ops.addresses import remove_dead_socket

log = structlog.get_logger(__name__)

# Addresses of which a host has one at a port.
ANY_HOST = ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]")  # noqa: S104
DRIVER_FILE = Path("/dev/nvidiactl")


def with_device(settings: Settings) -> Settings:
    """The settings with the name of a device that torch can use. Logs which, and a warning with the reason
    for a CPU beside a GPU. Raises ConfigurationError for a GPU that torch cannot use."""
    import torch

    if settings.device == "cpu":
        if has_gpu():
            log.warning(
                "the tower runs on the CPU beside a GPU", reason="--device is cpu, auto takes the GPU"
            )
        return settings
    num_gpus, reason = usable_gpus()
    if settings.device == AUTO:
        if num_gpus:
            log.info("the tower runs on a GPU", device="cuda:0", name=torch.cuda.get_device_name(0))
            return settings.model_copy(update={"device": "cuda:0"})
        if settings.num_device_bytes:
            raise ConfigurationError(
                f"{settings.num_device_bytes} bytes of device arenas are a GPU's memory, and torch can use "
                f"no GPU here: {reason}"
            )
        if has_gpu():
            log.warning("the tower runs on the CPU beside a GPU", reason=reason)
        else:
            log.info("the tower runs on the CPU", reason="this host has no NVIDIA GPU")
        return settings.model_copy(update={"device": "cpu"})
    if not num_gpus:
        raise ConfigurationError(f"--device is {settings.device}, and torch can use no GPU here: {reason}")
    if (torch.device(settings.device).index or 0) >= num_gpus:
        raise ConfigurationError(
            f"--device is {settings.device}, and torch sees {num_gpus} GPU(s): cuda:0"
            + (f" to cuda:{num_gpus - 1}" if num_gpus > 1 else "")
        )
    return settings


def check_driver(device: str) -> None:
    """Raises ConfigurationError for a GPU on a host without any part of NVIDIA's driver. What else keeps
    torch from a GPU is found by ``with_device``."""
    if device.startswith("cuda") and not (has_gpu() or has_driver_library()):
        raise ConfigurationError(
            f"--device is {device}, and this host has no NVIDIA driver: there is no {DRIVER_FILE}, "
            "nvidia-smi or libcuda.so.1; a container needs NVIDIA's runtime (docker run --gpus all); "
            "--device auto takes the CPU where there is no GPU"
        )


def check_installed(settings: Settings) -> None:
    """Raises ConfigurationError for what a setting needs and this host or environment lacks, as far as it
    shows without torch."""
    check_driver(settings.device)
    on_cpu = settings.device == "cpu" or (settings.device == AUTO and not (has_gpu() or has_driver_library()))
    if on_cpu or settings.tower == "plain":
        check_plain_attention(settings, "cpu" if on_cpu else settings.device)
    if settings.traces != "off":
        check_tracing()
    if settings.serve_tokenspeed and importlib.util.find_spec("mooncake") is None:
        raise ConfigurationError(
            "--serve-tokenspeed needs Mooncake, which is not installed: pip install '.[serve,tokenspeed]' in "
            "a checkout, and the system's libibverbs1"
        )


def check_tracing() -> None:
    """Raises ConfigurationError where OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"traces need the extra otel (pip install '.[serve,otel]' in a checkout): {error}"
        ) from None


def check_plain_attention(settings: Settings, device: str) -> None:
    """Raises ConfigurationError for an attention backend that the plain tower does not have."""
    if settings.attention not in (AUTO, "sdpa"):
        raise ConfigurationError(
            f"--attention is {settings.attention}, which needs a GPU and --tower auto; the device is "
            f"{device}, the tower {settings.tower}: sdpa and auto run there"
        )


def has_gpu() -> bool:
    """Whether NVIDIA's driver is installed, also where torch cannot use it."""
    return DRIVER_FILE.exists() or shutil.which("nvidia-smi") is not None


def has_driver_library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def usable_gpus() -> tuple[int, str]:
    """How many GPUs torch can use, and the reason if that is none."""
    import torch

    with warnings.catch_warnings():  # of a driver that is too old; the reason has the text
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return torch.cuda.device_count(), ""
    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"torch {torch.__version__} is a build for the CPU, install a build for CUDA"
    if not has_driver_library():
        return 0, (
            "the driver's library libcuda.so.1 is not found; a container needs NVIDIA's runtime, with "
            "compute in NVIDIA_DRIVER_CAPABILITIES"
        )
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        return 0, f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:
        cause = str(error).partition("\n")[0]
    else:
        cause = "torch.cuda.is_available() is False"
    return 0, f"torch {torch.__version__} for CUDA {torch.version.cuda} says: {cause}"


def with_broker_path(settings: Settings, listen: Sequence[str]) -> Settings:
    """The settings with the path of the broker's socket, or with none where no folder for it can be used:
    rows are then sent inline, which a warning says. listen: the gRPC addresses as bound. Raises
    ConfigurationError if other settings need the broker. Blocks like ``remove_dead_socket``."""
    if settings.broker_path != AUTO:
        return settings
    try:
        path = default_path(listen)
        check_address(f"unix:{path}")
        remove_dead_socket(path)
    except (ConfigurationError, ValueError, OSError) as error:
        if settings.device_arena_bytes or settings.isolated_namespaces:
            raise ConfigurationError(f"{error}; set --broker-path to a path that can be used") from error
        log.warning("rows are sent inline, without shared memory", reason=str(error), remedy="--broker-path")
        path = ""
    return settings.model_copy(update={"broker_path": path})


def default_path(listen: Sequence[str]) -> str:
    """Of the broker's socket: in a folder of this user and named after the port; without one beside the unix
    socket. Raises ConfigurationError, OSError."""
    bound = [address.rpartition(":") for address in listen if not address.startswith("unix:")]
    if not bound:
        return f"{os.path.abspath(listen[0].removeprefix('unix:'))}.broker"
    host, _, port = bound[0]
    # Services at one port of several addresses have sockets of their own.
    name = port if host in ANY_HOST else f"{host.strip('[]').replace(':', '_')}-{port}"
    return str(socket_folder() / f"{name}.sock")


def socket_folder() -> Path:
    """A folder that only this user may enter; made where it is missing. Raises ConfigurationError for a
    folder that somebody else made or may enter, OSError."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "vision-encoder"
    else:
        folder = Path(tempfile.gettempdir()) / f"vision-encoder-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise ConfigurationError(
            f"{folder} is not a folder of user {os.getuid()} alone: it has mode "
            f"{stat.filemode(status.st_mode)} and is user {status.st_uid}'s"
        )
    return folder
