"""The options that every client has. Their documentation is that of ``AsyncVisionEncoderClient``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from lm_adapter.channel import ClientTls, FilePath

if TYPE_CHECKING:
    import torch

    from lm_adapter.types import CheckServer


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of ``AsyncVisionEncoderClient``, except ``fleet`` and ``repeats``."""

    namespace: str
    model: str
    timeout_s: float
    transports: Sequence[str]
    broker_path: str
    token: str
    token_file: FilePath
    tls: ClientTls | None
    max_rows_bytes: int
    device: str | int | torch.device | None
    options: Mapping[str, int | str] | None
    max_in_flight: int
    waits: bool
    check_server: CheckServer | None
