"""Interface between the service and its servers of protocols other than gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.applications import Starlette

from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.urls import UrlFetcher
from encoder_service.pipeline import Pipeline
from encoder_service.types import Modality


@dataclass(frozen=True)
class Backend:
    """What a server encodes with. urls: None if the service refuses URL items. segments: None if it refuses
    pixels in shared memory. max_file_bytes: of an image's and of a clip's file."""

    pipeline: Pipeline
    urls: UrlFetcher | None
    segments: PixelSegments | None
    max_file_bytes: Mapping[Modality, int]


class ProtocolServer(Protocol):
    """A server of one protocol. The service calls the methods in this order, each at most once. app: the
    service serves it over HTTP from before ``open`` until before ``stop``."""

    app: Starlette

    @property
    def num_calls(self) -> int:
        """Calls in progress, except those that the service's gate counts."""

    async def open(self) -> None:
        """Binds the ports that the protocol needs besides the HTTP port. Called before the model is loaded.
        Raises ConfigurationError."""

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on. Raises StartupError."""

    async def leave(self) -> None:
        """Announces to the other system that the service stops. Work is still taken."""

    async def drain(self, ends_s: float) -> None:
        """Returns once no work is in progress, or at that time of the monotonic clock."""

    async def stop(self) -> None:
        """Releases what the server holds. Also called after a failed start."""
