"""The broker's wire contract: generated code, numbers and bytes never change, both sides agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from encoder_service.transport import access, framing, socket_file
from lm_adapter.transport import broker_frames, broker_handshake, broker_socket
from tests.contract import wire_fields
from tests.contract.test_proto import declared_contract
from vision_encoder.v1 import broker_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto" / "vision_encoder" / "v1" / "broker.proto"


def test_generated_code_says_what_the_proto_file_says() -> None:
    text = PROTO.read_text()
    assert wire_fields.contract_of(pb.DESCRIPTOR) == declared_contract(text)
    assert "bytes arena_id = 1;" in text
    changed = text.replace("uint32 num_descriptors = 2;", "uint32 num_descriptors = 12;")
    assert declared_contract(changed) != wire_fields.contract_of(pb.DESCRIPTOR)


def test_no_recorded_number_changed_or_went_and_all_are_recorded() -> None:
    recorded = wire_fields.read_golden(wire_fields.BROKER_GOLDEN)
    current = wire_fields.contract_of(pb.DESCRIPTOR)
    assert wire_fields.broken_entries(recorded, current, wire_fields.reserved_numbers(pb.DESCRIPTOR)) == []
    assert wire_fields.missing_entries(recorded, current) == []


def test_enum_zero_is_unspecified() -> None:
    zeros = {kind.values_by_number[0].name for kind in pb.DESCRIPTOR.enum_types_by_name.values()}
    assert zeros == {"ARENA_KIND_UNSPECIFIED", "LOCAL_FRAME_UNSPECIFIED"}


@pytest.mark.parametrize("suffix", [".py", ".pyi"])
def test_the_generated_module_and_its_stub_are_there(suffix: str) -> None:
    text = (PROTO.parent / f"broker_pb2{suffix}").read_text()
    assert "BrokerHello" in text
    assert not (PROTO.parent / f"broker_pb2_grpc{suffix}").exists(), "there is no service in it"


# One of each direction, whole frames: what an older or newer release really sends.
HELLO = pb.BrokerRequest(
    request_id=1,
    hello=pb.BrokerHello(
        protocol_version=1, min_protocol_version=1, namespace="n", token="t", client_name="c", pid=7
    ),
)
ATTACHED = pb.BrokerReply(
    request_id=2,
    num_descriptors=2,
    attached=pb.BrokerAttached(
        geometry=pb.ArenaGeometry(
            arena_id=b"\x11" * 16,
            kind=pb.ARENA_KIND_DEVICE,
            size_bytes=1 << 21,
            page_bytes=4096,
            device_uuid="GPU-0",
        )
    ),
)
FRAMES = {
    "hello": (HELLO, "56454252000000130801120f080110011a016e2201742a01633007"),
    "attached": (
        ATTACHED,
        "564542520000002b080210023225"
        "0a230a1011111111111111111111111111111111100218808080012080202a054750552d30",
    ),
}


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_p35_frame_bytes_are_the_recorded_ones(name: str) -> None:
    message, recorded = FRAMES[name]
    payload = message.SerializeToString(deterministic=True)
    assert framing.encode_frame(payload).hex() == recorded
    assert broker_frames.encode_frame(payload).hex() == recorded


def test_p35_both_sides_have_the_same_frames_versions_and_bounds() -> None:
    assert framing.MAGIC == broker_frames.MAGIC == b"VEBR"
    assert framing.MAX_PAYLOAD_BYTES == broker_frames.MAX_PAYLOAD_BYTES == 65536
    assert socket_file.MAX_PATH_BYTES == broker_socket.MAX_PATH_BYTES
    assert access.MIN_PROTOCOL_VERSION <= broker_handshake.PROTOCOL_VERSION
    assert broker_handshake.MIN_PROTOCOL_VERSION <= access.PROTOCOL_VERSION
    head = re.search(r'"VEBR".*at most (\d+)', PROTO.read_text())
    assert head is not None
    assert int(head.group(1)) == framing.MAX_PAYLOAD_BYTES


def test_p35_no_pickle_on_the_broker() -> None:
    root = Path(__file__).parents[2]
    for folder in ("encoder_service/transport", "lm_adapter/transport"):
        for path in (root / folder).glob("*.py"):
            assert not re.search(r"\b(pickle|marshal|shelve|send_fds)\b", path.read_text()), path
