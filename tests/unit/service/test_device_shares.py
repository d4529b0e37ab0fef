"""Namespaces and their weights reach the planner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from encoder_service.app import Service
from encoder_service.config import parse_settings
from encoder_service.flights import Flight
from encoder_service.ingest_run import IngestRun
from encoder_service.metrics import Metrics
from encoder_service.scheduler.admission import Admission
from encoder_service.scheduler.planner import Ticket
from encoder_service.types import Grid
from tests.fakes import FakePreprocessor, FakeTower

pytestmark = pytest.mark.anyio


async def test_a_ticket_is_of_its_flights_namespace() -> None:
    ingest: Any = MagicMock(max_patches=64, tower=FakeTower())
    announced: asyncio.Future[Grid] = asyncio.get_running_loop().create_future()
    flight = Flight(b"k", b"d", "tenant", Ticket(0), announced)
    IngestRun._admit(ingest, flight, Grid(1, 4, 4), Admission(64, 64).acquire(1))
    assert (flight.ticket.namespace, flight.ticket.num_patches) == ("tenant", 16)


async def test_weights_of_the_device_are_those_of_the_rows_but_for_what_is_said() -> None:
    settings = parse_settings(
        model=Path("/m"), namespace_shares="a=2,b=3", device_shares="b=5,c=0.5", admin_listen=""
    )
    service: Any = SimpleNamespace(settings=settings, metrics=Metrics(), _leave_service=lambda fault: None)
    model: Any = SimpleNamespace(tower=FakeTower(), preprocessor=FakePreprocessor())
    engine = Service._build_engine(service, model, None, None)
    assert engine._planner._queue._weights == {"a": 2.0, "b": 5.0, "c": 0.5}
    assert engine.stop(1.0)
