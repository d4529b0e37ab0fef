"""A broker, or a client of one, as a process of its own that a test can kill.

``serve PATH INSTANCE``: offers one arena of host memory, says ``ready`` and then ``gone OWNER`` for every
owner that left; SIGTERM stops it. ``hold PATH``: connects, attaches every arena, says ``holding OWNER`` and
keeps asking. ``read PATH``: maps the arena of a real encoder and says what it found as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

CONTENT_BYTES = 8192


def content_of(instance: str) -> bytes:
    """What the arena of this instance holds."""
    return hashlib.sha256(instance.encode()).digest() * (CONTENT_BYTES // 32)


def say(*words: str) -> None:
    print(*words, flush=True)


def serve(path: str, instance: str) -> None:
    from encoder_service.transport.access import BrokerAccess
    from encoder_service.transport.broker import Broker
    from encoder_service.transport.broker_options import BrokerOptions, ConnectionLimits
    from encoder_service.transport.offers import ArenaOffer, OfferBook, ProbeSlot

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    options = BrokerOptions(
        path,
        instance,
        "host",
        access=BrokerAccess(open_namespaces=True),
        heartbeat_s=0.1,
        limits=ConnectionLimits(handshake_s=1, frame_s=1, send_s=1, idle_s=2),
    )
    broker = Broker(options, OfferBook(), on_disconnect=lambda owner_id: say("gone", owner_id))
    broker.start()
    content = content_of(instance)
    arena_id = hashlib.sha256(content).digest()[:16]
    data_fd, page_fd = os.memfd_create("arena"), os.memfd_create("page")
    os.write(data_fd, content)
    os.write(page_fd, arena_id)
    probe = ProbeSlot(0, CONTENT_BYTES, hashlib.sha256(content).digest())
    broker.offer(ArenaOffer(arena_id, "host", CONTENT_BYTES, 16, probe=probe), data_fd, page_fd)
    os.close(data_fd)
    os.close(page_fd)
    say("ready")
    signal.sigwait([signal.SIGTERM])
    say("stopped" if broker.stop() else "stuck")


def hold(path: str) -> None:
    from lm_adapter.transport.broker_client import BrokerClient

    client = BrokerClient(path, min_pause_s=0.01, max_pause_s=0.1)
    session = client.connect(timeout_s=20)
    held = [client.attach(arena.arena_id) for arena in session.arenas]
    say("holding", session.owner_id)
    while held:
        client.ping()
        client.attach(held[0].geometry.arena_id).close()
        time.sleep(0.005)


def read(path: str) -> None:
    from lm_adapter.transport.broker_client import BrokerClient
    from lm_adapter.transport.control_page import ControlPageReader
    from lm_adapter.transport.mapping import map_host

    with BrokerClient(path) as client:
        session = client.connect(timeout_s=20)
        (arena,) = session.arenas
        probe = client.probe(arena.arena_id)
        with client.attach(arena.arena_id) as attached:
            mapping = map_host(attached.data_fd, arena.size_bytes)
            page = ControlPageReader(attached.page_fd, arena.page_bytes, arena_id=arena.arena_id)
        # The descriptors are closed: what follows goes through the mappings.
        end = probe.offset_bytes + probe.num_bytes
        data = mapping.tensor[probe.offset_bytes : end].numpy().tobytes()
        found = {
            "pid": os.getpid(),
            "host_id": session.host_id,
            "probe_matches": hashlib.sha256(data).digest() == probe.sha256,
            "page_agrees": page.probe.sha256 == probe.sha256,
            "rows": hashlib.sha256(mapping.tensor[end:].numpy().tobytes()).hexdigest(),
        }
        page.close()
        mapping.close()
        say("found", json.dumps(found))


if __name__ == "__main__":
    {"serve": serve, "hold": hold, "read": read}[sys.argv[1]](*sys.argv[2:])
