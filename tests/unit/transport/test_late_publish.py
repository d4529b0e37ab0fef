"""Segments whose publisher did not hear of them: the broker is told that nobody needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.pixel_segments import PixelCounters
from lm_adapter.transport import broker_link
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_waiting import Waiting
from lm_adapter.transport.publish import PublishedPixels, PublishFailed, publish_pixels
from tests.unit.transport.broker_rig import num_descriptors, running_broker, wait_until

PIXELS = np.ones((64, 64), np.float32)


class Slow:
    """A broker whose answers to a publish wait for ``go``."""

    def __init__(self, path: str, book: SegmentBook, desk: Any) -> None:
        self.path, self.book = path, book
        self.go, self.asked = threading.Event(), threading.Event()
        self.go.set()
        publish = desk._publish

        def slow(*arguments: Any) -> None:
            self.asked.set()
            assert self.go.wait(20)
            publish(*arguments)

        desk._publish = slow


@pytest.fixture
def slow() -> Iterator[Slow]:
    book = SegmentBook(1 << 30, PixelCounters())
    with running_broker(segments=book) as rig:
        yield Slow(rig.path, book, rig.broker._desk)


def works_on(client: BrokerClient, slow: Slow, session: object) -> None:
    """On the same connection, and nothing is held that nobody knows of."""
    with publish_pixels(PIXELS, broker=client):
        wait_until(lambda: len(slow.book) == 1, "the end of what was late")
    wait_until(lambda: len(slow.book) == 0, "the end of this one")
    assert client.session is session


def test_p21_a_segment_whose_reply_is_late_is_given_up(slow: Slow) -> None:
    with BrokerClient(slow.path, request_timeout_s=0.2) as client:
        session = client.connect()
        before = num_descriptors()
        for _ in range(3):
            slow.go.clear()
            with pytest.raises(PublishFailed, match="no reply of the broker within"):
                publish_pixels(PIXELS, broker=client)
            slow.go.set()
            wait_until(lambda: len(slow.book) == 0 and slow.book._counters.published > 0, "its end")
        wait_until(lambda: num_descriptors() == before, "every descriptor's end")
        works_on(client, slow, session)


def test_p21_a_late_reply_that_a_caller_reads_for_itself_is_given_up_too(slow: Slow) -> None:
    """A thread that waits for rows delivers what comes for others."""
    with BrokerClient(slow.path, request_timeout_s=0.2) as client:
        session = client.connect()
        link = client._link
        assert link is not None
        slow.go.clear()
        with pytest.raises(PublishFailed):
            publish_pixels(PIXELS, broker=client)
        done = threading.Event()
        threading.Timer(0.1, slow.go.set).start()
        link.read_until(done, 0.5)
        wait_until(lambda: len(slow.book) == 0, "its end")
        works_on(client, slow, session)


def test_p21_an_interrupted_publisher_leaves_no_segment(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the reply, with it, and after it."""
    with BrokerClient(slow.path, request_timeout_s=5) as client:
        session = client.connect()

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        # While it waits; the reply comes afterwards.
        class Wait(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert slow.asked.wait(20)
                raise KeyboardInterrupt

        monkeypatch.setattr(broker_link, "Waiting", lambda: Waiting(done=Wait()))
        slow.go.clear()
        slow.asked.clear()
        with pytest.raises(KeyboardInterrupt):
            publish_pixels(PIXELS, broker=client)
        slow.go.set()
        monkeypatch.undo()
        works_on(client, slow, session)

        # With the reply there, and nobody to take it.
        class Arrived(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert super().wait(20)
                raise KeyboardInterrupt

        monkeypatch.setattr(broker_link, "Waiting", lambda: Waiting(done=Arrived()))
        with pytest.raises(KeyboardInterrupt):
            publish_pixels(PIXELS, broker=client)
        monkeypatch.undo()
        works_on(client, slow, session)

        # With the segment's id in hand.
        monkeypatch.setattr(PublishedPixels, "_owns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish_pixels(PIXELS, broker=client)
        monkeypatch.undo()
        works_on(client, slow, session)


def test_a_segment_belongs_to_the_connection_that_it_was_published_over(slow: Slow) -> None:
    """Also where that has just taken another's place."""
    with BrokerClient(slow.path, max_pause_s=0.01) as client:
        first = client.connect()
        live_link = client._live_link

        def lose_it_first() -> Any:
            client._live_link = live_link  # type: ignore[method-assign]
            link = client._link
            assert link is not None
            link._socket.shutdown(2)
            wait_until(lambda: client.session not in (None, first), "the next session")
            return live_link()

        client._live_link = lose_it_first  # type: ignore[method-assign]
        try:
            published = publish_pixels(PIXELS, broker=client)
        except PublishFailed:
            pass
        else:
            assert client.session is not None
            assert published.owner_id == client.session.owner_id.encode()
            assert len(slow.book) == 1
            published.close()
        wait_until(lambda: len(slow.book) == 0, "its end")


def test_a_full_socket_does_not_stop_the_thread_that_reads(slow: Slow) -> None:
    """A late reply is read while the broker takes nothing."""
    with BrokerClient(slow.path, request_timeout_s=0.2) as client:
        client.connect()
        link = client._link
        assert link is not None
        slow.go.clear()
        with pytest.raises(PublishFailed):
            publish_pixels(PIXELS, broker=client)
        link._sending.takes_more = lambda: False  # type: ignore[method-assign]
        slow.go.set()
        wait_until(lambda: len(slow.book) == 1, "the late publish")
        time.sleep(0.1)
        since_s = time.monotonic()
        client.ping()
        assert time.monotonic() - since_s < 0.2
        del link._sending.takes_more
        wait_until(lambda: len(slow.book) == 0, "its end")
