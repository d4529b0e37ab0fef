"""The wire contracts: numbers never change, bytes never change, readers tolerate later versions.

``make lint`` compares the generated code with the proto files. Recorded numbers are in golden/, written by
wire_fields.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from tests.contract import wire_fields
from vision_encoder.layout import frames
from vision_encoder.v1 import broker_pb2 as broker
from vision_encoder.v1 import encoder_pb2 as pb

ROOT = Path(__file__).parents[2]
GOLDEN_MESSAGES = Path(__file__).parent / "golden" / "encoder_v1_messages.json"
FILES = {wire_fields.GOLDEN: pb.DESCRIPTOR, wire_fields.BROKER_GOLDEN: broker.DESCRIPTOR}


@pytest.mark.parametrize(("golden", "file"), FILES.items(), ids=["encoder", "broker"])
def test_no_recorded_number_changed_or_went_and_all_are_recorded(golden: Path, file: FileDescriptor) -> None:
    recorded, current = wire_fields.read_golden(golden), wire_fields.contract_of(file)
    assert wire_fields.broken_entries(recorded, current) == []
    assert recorded == current, "record additions: PYTHONPATH=proto python tests/contract/wire_fields.py"


def test_the_record_catches_change_and_removal() -> None:
    recorded = {"v1.A": {"1": "bytes key", "2": "uint32 rows"}}
    broken = wire_fields.broken_entries
    assert broken(recorded, {"v1.A": {"1": "bytes key", "2": "reserved", "3": "bool ok"}}) == []
    changed = {"v1.A": {"1": "bytes key", "2": "uint64 rows"}}
    assert broken(recorded, changed) == ["v1.A 2 was 'uint32 rows', is 'uint64 rows'"]
    assert broken(recorded, {"v1.A": {"1": "bytes key"}}) == ["v1.A 2 was 'uint32 rows', is 'gone'"]


@pytest.mark.parametrize("file", FILES.values(), ids=["encoder", "broker"])
def test_enum_zero_is_unspecified(file: FileDescriptor) -> None:
    for name, enum in file.enum_types_by_name.items():
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        assert enum.values_by_number[0].name == f"{snake}_UNSPECIFIED"


# One message of every kind that passes between the two sides.
MESSAGES: dict[str, Message] = {
    "encode_request": pb.EncodeRequest(
        items=[
            pb.Item(
                modality=pb.MODALITY_IMAGE,
                content_digest=bytes(range(32)),
                options=pb.PreprocessOptions(min_pixels=65536, max_pixels=1 << 33, max_patches=0),
                encoded=b"\xff\xd8\xff\xe0",
            ),
            pb.Item(
                modality=pb.MODALITY_VIDEO, options=pb.PreprocessOptions(fps=0.5), url="https://e.org/a.mp4"
            ),
            pb.Item(
                modality=pb.MODALITY_IMAGE,
                pixels=pb.PixelTensor(
                    grid_thw=pb.GridTHW(t=1, h=2, w=2),
                    inline=pb.InlineTensor(dtype=pb.DTYPE_FLOAT32, shape=[4, 1536], data=b"\x00\x01\x02\x03"),
                ),
            ),
            pb.Item(
                modality=pb.MODALITY_IMAGE,
                pixels=pb.PixelTensor(
                    grid_thw=pb.GridTHW(t=1, h=64, w=48),
                    shm=pb.ShmTensor(
                        name="ve-1",
                        offset_bytes=4096,
                        dtype=pb.DTYPE_BFLOAT16,
                        shape=[3072, 1536],
                    ),
                ),
            ),
            pb.Item(modality=pb.MODALITY_IMAGE, content_digest=b"\xaa" * 32, digest_only=pb.DigestOnly()),
        ],
        namespace="tenant",
        model="qwen",
        delivery=pb.DELIVERY_INLINE,
        after_lost_read=True,
    ),
    "inline_result": pb.ItemEvent(
        item_index=3,
        result=pb.ItemResult(
            key=b"\x11" * 32,
            content_digest=b"\x22" * 32,
            grid_thw=pb.GridTHW(t=1, h=64, w=48),
            num_rows=768,
            width=16384,
            dtype=pb.DTYPE_BFLOAT16,
            num_deepstack_levels=3,
            tier=pb.CACHE_TIER_MISS,
            timings=pb.StageTimings(
                identify_ms=0.25,
                admit_ms=0.5,
                decode_ms=4,
                resize_ms=2,
                queue_ms=1,
                tower_ms=8,
                store_ms=0.125,
            ),
            rows_bytes=25165824,
            inline=pb.InlineRows(num_chunks=24),
            timestamps_s=[0.25, 1.25],
        ),
    ),
    "placed_result": pb.ItemEvent(
        result=pb.ItemResult(
            tier=pb.CACHE_TIER_DEVICE,
            place=pb.RowsPlace(
                arena_id=b"\x55" * 16,
                instance=3,
                slot_index=7,
                generation=9,
                offset_bytes=1 << 32,
                delivery=pb.DELIVERY_DEVICE,
            ),
        )
    ),
    "touch_request": pb.TouchRequest(
        rows=[pb.TouchedRows(key=b"\x66" * 32, generation=9)], namespace="tenant", num_lost=1
    ),
    "chunk": pb.ItemEvent(item_index=3, chunk=pb.RowsChunk(offset_bytes=1 << 20, data=b"\x01\x02")),
    "failure": pb.ItemEvent(
        item_index=1,
        failure=pb.ItemFailure(
            reason="QUEUE_FULL",
            status=8,
            message="full",
            retryable=True,
            retry_after_ms=50,
            details={"found": "9", "allowed": "8"},
        ),
    ),
    "server_info": pb.GetServerInfoResponse(
        protocol_version=1,
        min_protocol_version=1,
        server_version="0.1.0",
        instance_id="a",
        device="cpu",
        models=[
            pb.ModelInfo(
                name="m",
                family="kimi_k25",
                model_fingerprint=b"\x01" * 32,
                preprocess_fingerprint=b"\x02" * 32,
                dtype=pb.DTYPE_FLOAT32,
                out_width=64,
                width=64,
                patch_size=14,
                spatial_merge_size=2,
                temporal_patch_size=1,
                patch_dim=588,
                merges_time=True,
                modalities=[pb.MODALITY_IMAGE, pb.MODALITY_VIDEO],
            )
        ],
        limits=pb.Limits(max_items_per_request=256, max_message_bytes=1 << 28, chunk_bytes=1 << 20),
        transports=[pb.TransportInfo(delivery=pb.DELIVERY_INLINE, host_id="h")],
    ),
    "lookup_response": pb.LookupResponse(
        statuses=[
            pb.KeyStatus(
                key=b"\x66" * 32,
                state=pb.KEY_STATE_RESIDENT,
                grid_thw=pb.GridTHW(t=2, h=4, w=6),
                num_rows=12,
                tier=pb.CACHE_TIER_HOST,
            )
        ]
    ),
    "prefetch_response": pb.PrefetchResponse(
        statuses=[
            pb.PrefetchStatus(key=b"\x77" * 32, state=pb.KEY_STATE_IN_FLIGHT, num_rows=4),
            pb.PrefetchStatus(failure=pb.ItemFailure(reason="UNDECODABLE_IMAGE", status=3)),
        ]
    ),
}


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_wire_bytes_are_the_recorded_ones(name: str) -> None:
    message = MESSAGES[name]
    recorded = bytes.fromhex(json.loads(GOLDEN_MESSAGES.read_text())[name])
    assert message.SerializeToString(deterministic=True).hex() == recorded.hex()
    assert type(message).FromString(recorded) == message


def test_a_reader_tolerates_fields_and_enum_values_of_a_later_version() -> None:
    later = pb.GridTHW(t=1, h=2, w=3).SerializeToString() + bytes([0xF8, 0x3F, 0x05])  # field 1023, varint 5
    grid = pb.GridTHW.FromString(later)
    assert (grid.t, grid.h, grid.w) == (1, 2, 3)
    assert grid.SerializeToString() == later, "an intermediary must not drop what it does not know"
    assert pb.KeyStatus.FromString(bytes([0x10, 0x63])).state == 99


def test_an_absent_option_differs_from_zero() -> None:
    options = pb.PreprocessOptions.FromString(pb.PreprocessOptions(max_patches=0).SerializeToString())
    assert options.HasField("max_patches")
    assert not options.HasField("max_patches_per_side")


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
