"""Clients of a whole fleet of encoders: each item at its home, and elsewhere when that fails.

``async_client`` and ``client`` are the faces. ``ring`` says whose home a replica is, ``directory`` which
replicas there are and how they do, ``call`` what is tried in which order, ``run`` runs it. Each replica is
talked to by the ordinary client, so that rows come by lease, through shared memory or inline as ever."""

from lm_adapter.fleet.async_client import AsyncFleetClient
from lm_adapter.fleet.call import FleetCounts
from lm_adapter.fleet.client import FleetClient
from lm_adapter.fleet.directory import ReplicaView
from lm_adapter.fleet.endpoints import DnsEndpoints, Endpoints
from lm_adapter.fleet.fallback import Fallback
from lm_adapter.fleet.settings import FleetSettings

__all__ = [
    "AsyncFleetClient",
    "DnsEndpoints",
    "Endpoints",
    "Fallback",
    "FleetClient",
    "FleetCounts",
    "FleetSettings",
    "ReplicaView",
]
