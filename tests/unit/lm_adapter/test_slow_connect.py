"""A server that is slow to shake hands is connected to all the same."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

from lm_adapter import VisionEncoderClient
from lm_adapter.testing import FakeEncoder

DELAY_S = 0.6


@contextlib.contextmanager
def delayed(host: str, port: int) -> Iterator[str]:
    """The address of a relay to that one, which passes nothing on for ``DELAY_S``; for one connection."""

    def relay(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        time.sleep(DELAY_S)
        with caller, socket.create_connection((host, port)) as server:
            other = {caller: server, server: caller}
            while True:
                for ready in select.select(list(other), [], [])[0]:
                    try:
                        data = ready.recv(1 << 16)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    other[ready].sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.join(10)
    assert not thread.is_alive()


def test_p32_a_slow_handshake_is_waited_for() -> None:
    with FakeEncoder() as fake:
        host, _, port = fake.target.rpartition(":")
        with (
            delayed(host, int(port)) as address,
            VisionEncoderClient(address, timeout_s=20, transports=("inline",)) as client,
        ):
            started_s = time.monotonic()
            assert client.lookup([bytes(32)])
            assert time.monotonic() - started_s >= DELAY_S
