"""The wire contracts: numbers never change, bytes never change.

``make lint`` compares the generated code with the proto files. Recorded numbers are in golden/, written by
wire_fields.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from tests.contract import wire_fields
from vision_encoder.layout import frames
from vision_encoder.v1 import broker_pb2 as broker
from vision_encoder.v1 import encoder_pb2 as pb

ROOT = Path(__file__).parents[2]
GOLDEN_MESSAGES = json.loads((Path(__file__).parent / "golden" / "encoder_v1_messages.json").read_text())
FILES = {wire_fields.GOLDEN: pb.DESCRIPTOR, wire_fields.BROKER_GOLDEN: broker.DESCRIPTOR}


@pytest.mark.parametrize(("golden", "file"), FILES.items(), ids=["encoder", "broker"])
def test_no_recorded_number_changed_or_went_and_all_are_recorded(golden: Path, file: FileDescriptor) -> None:
    recorded, current = wire_fields.read_golden(golden), wire_fields.contract_of(file)
    assert recorded == current, "record additions: PYTHONPATH=proto python tests/contract/wire_fields.py"


@pytest.mark.parametrize("name", sorted(GOLDEN_MESSAGES))
def test_wire_bytes_are_the_recorded_ones(name: str) -> None:
    """One message of every kind that passes between the two sides."""
    recorded = GOLDEN_MESSAGES[name]
    message: Message = json_format.ParseDict(recorded["fields"], getattr(pb, recorded["type"])())
    assert message.SerializeToString(deterministic=True).hex() == recorded["wire"]
    assert type(message).FromString(bytes.fromhex(recorded["wire"])) == message


# The broker's frames


def test_p35_frame_bytes_are_the_recorded_ones() -> None:
    hello = broker.BrokerHello(
        protocol_version=1, min_protocol_version=1, namespace="n", token="t", client_name="c"
    )
    payload = broker.BrokerRequest(request_id=1, hello=hello).SerializeToString(deterministic=True)
    recorded = "56454252000000110801120d080110011a016e2201742a0163"
    assert frames.encode_frame(payload).hex() == recorded


def test_p35_no_pickle_in_the_product() -> None:
    for package in ("encoder_service", "lm_adapter", "proto"):
        for path in (ROOT / package).rglob("*.py"):
            found = re.search(
                r"^\s*(import|from) (pickle|marshal|shelve)\b|torch\.load\(|allow_pickle=True",
                path.read_text(),
                re.MULTILINE,
            )
            assert not found, path
