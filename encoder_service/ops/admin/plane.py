"""The admin port of one service, with all that is behind it.

Owns when its parts begin to work: the port answers before the model is loaded, figures and the playground
come with the pipeline. What each part is lies in the modules beside this one.
"""

from __future__ import annotations

from encoder_service.broker import Broker
from encoder_service.config import Settings
from encoder_service.engine.device import DeviceEngine
from encoder_service.ops.admin.access import open_admin
from encoder_service.ops.admin.app import AdminServer, Readiness, create_admin_app
from encoder_service.ops.admin.gauges import register_broker, register_gauges
from encoder_service.ops.admin.live import LiveView
from encoder_service.ops.admin.playground import Playground
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import Pipeline


class AdminPlane:
    """``open``, ``attach``, ``stop`` in that order. address: host:port once open, else empty."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.address = ""
        self._settings, self._metrics = settings, metrics
        self._live = LiveView(metrics)
        self._playground = Playground(settings.max_encoded_bytes) if settings.playground else None
        self._server: AdminServer | None = None

    def open(self, readiness: Readiness) -> None:
        """Binds and answers, where the settings name an address. Raises ConfigurationError."""
        if self._settings.admin_listen:
            app = create_admin_app(readiness, self._metrics, self._live, self._playground)
            self._server = open_admin(app, self._settings)
            self.address = self._server.address
            self._server.start()

    def attach(self, pipeline: Pipeline, engine: DeviceEngine, broker: Broker | None) -> None:
        """What there is to see, from now on."""
        register_gauges(self._metrics, pipeline, engine)
        if broker is not None:
            register_broker(self._metrics, broker, pipeline.store)
        self._live.attach(pipeline, engine, broker)
        self._live.start()
        if self._playground is not None:
            self._playground.attach(pipeline)

    async def stop(self) -> None:
        self._live.stop()
        if self._server is not None:
            await self._server.stop()
