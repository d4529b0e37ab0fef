"""What the composition root asks of a server of another system's protocol, and what it gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.applications import Starlette

from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.urls import UrlFetcher
from encoder_service.pipeline import Pipeline


@dataclass(frozen=True)
class Backend:
    """What encodes the requests. urls: None where URL items are refused. segments: None where pixels in
    shared memory are refused."""

    pipeline: Pipeline
    urls: UrlFetcher | None
    segments: PixelSegments | None


class ProtocolServer(Protocol):
    """The methods are called in this order, each once. app: served over HTTP from before ``open`` until
    before ``stop``."""

    app: Starlette

    async def open(self) -> None:
        """Binds the ports that the protocol needs besides that of ``app``, before the model is loaded. Raises
        ConfigurationError."""

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on. Raises StartupError."""

    async def leave(self) -> None:
        """Tells the other system that no more work is taken."""

    async def drain(self, ends_s: float) -> None:
        """Returns once no work is in progress, or at that time."""

    async def stop(self) -> None:
        """Gives back what the server holds, also after a start that failed."""
