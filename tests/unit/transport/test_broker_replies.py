"""Replies to requests for rows: of sizes that are not known before, in frames and rooms that have bounds."""

from __future__ import annotations

import os
from typing import Any

import pytest

from encoder_service.transport.broker_options import ConnectionLimits
from encoder_service.transport.framing import MAX_PAYLOAD_BYTES
from tests.unit.transport.broker_rig import RawClient
from tests.unit.transport.test_broker_fetch import Rig, fetch, fetching, keys, largest_result
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2


class Leasing:
    """Answers with results of a size, and knows which leases it has given."""

    def __init__(self, rig: Rig, num_timestamps: int) -> None:
        self.num_timestamps = num_timestamps
        self.given: set[bytes] = set()
        self.offered_bytes: list[int] = []
        self.fails_after = 1 << 30
        rig.desk.answer = self.answer
        rig.desk.take_back = self.given.remove

    def answer(
        self, _: str, __: str, request: pb.BrokerRequest, reply: pb.BrokerReply, max_bytes: int
    ) -> bool:
        self.offered_bytes.append(max_bytes)
        if request.HasField("renew"):
            reply.renewed.statuses.add(lease_id=os.urandom(MAX_PAYLOAD_BYTES))
            return True
        for number, key in enumerate(request.fetch.keys):
            if number >= self.fails_after:
                raise ZeroDivisionError("in the middle")
            result = largest_result(key)
            result.timestamps_s.extend([0.5] * self.num_timestamps)
            self.given.add(result.lease.lease_id)
            reply.fetched.items.append(pb.BrokerFound(result=result))
        return True


def test_a_reply_that_no_frame_holds_fails_its_request_and_its_leases_go_back() -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        leasing = Leasing(rig, MAX_PAYLOAD_BYTES // 8)
        failure = client.ask(fetch=fetch(*keys(3))).failure
        assert (failure.reason, failure.retryable) == ("TOO_MANY_UNDER_WAY", True)
        assert not leasing.given
        assert leasing.offered_bytes == [MAX_PAYLOAD_BYTES]
        assert rig.broker.counters.fetched == 0
        leasing.num_timestamps = 1
        assert len(client.ask(fetch=fetch(*keys(3))).fetched.items) == 3
        assert len(leasing.given) == 3
        renew = encoder_pb2.RenewRequest(lease_ids=[bytes(16)])
        assert client.ask(renew=renew).failure.reason == "TOO_MANY_UNDER_WAY"
        rig.desk.answer = rig.answer


def test_an_answer_that_breaks_in_the_middle_leaves_no_lease() -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        leasing = Leasing(rig, 1)
        leasing.fails_after = 2
        assert client.ask(fetch=fetch(*keys(3))).failure.reason == "INTERNAL"
        assert not leasing.given
        rig.desk.answer = rig.answer


def test_a_reply_that_cannot_be_posted_fails_its_request_and_its_leases_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        leasing = Leasing(rig, 1)
        connection = rig.broker._desk.owners[client.welcome.owner_id].connection
        post = connection.post

        def breaks(reply: pb.BrokerReply, now_s: float) -> bool:
            if reply.HasField("fetched"):
                raise ValueError("not to be sent")
            return post(reply, now_s)

        monkeypatch.setattr(connection, "post", breaks)
        failure = client.ask(fetch=fetch(*keys(3))).failure
        assert (failure.reason, failure.message) == ("INTERNAL", "ValueError: not to be sent")
        assert not leasing.given
        monkeypatch.undo()
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")
        rig.desk.answer = rig.answer


def test_large_replies_find_room_or_are_refused_and_never_end_a_connection() -> None:
    """Ten of 60 KB to a client that reads late: those beyond what may wait fail alone."""
    limits = ConnectionLimits(unsent_bytes=128 * 1024)
    with fetching(limits) as rig, RawClient(rig.path) as client:
        leasing = Leasing(rig, 60_000 // 8)
        with rig.hold():
            frames: list[Any] = [client.frame(fetch=fetch(*keys(1))) for _ in range(10)]
            client.socket.sendall(b"".join(frames))
            assert client.ask(ping=pb.BrokerPing()).HasField("pong")
        rig.turn()
        replies = [client.reply() for _ in range(10)]
        found = [reply for reply in replies if reply is not None and reply.HasField("fetched")]
        failed = [
            reply.failure.reason for reply in replies if reply is not None and reply.HasField("failure")
        ]
        assert len(found) + len(failed) == 10
        assert set(failed) == {"TOO_MANY_UNDER_WAY"}
        assert len(found) >= 2
        assert leasing.given == {reply.fetched.items[0].result.lease.lease_id for reply in found}
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")
        rig.desk.answer = rig.answer
