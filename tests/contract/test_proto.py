"""The wire contract: generated code is up to date, numbers never change, bytes never change.

`make proto-check` (part of `make lint`) compares the generated text byte by byte; here the generated
descriptors are compared with what encoder.proto says, which needs no generator.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

from tests.contract import wire_fields
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto" / "vision_encoder" / "v1" / "encoder.proto"
GOLDEN_MESSAGES = Path(__file__).parent / "golden" / "encoder_v1_messages.json"
SCALARS = {"double", "uint32", "uint64", "int64", "bool", "string", "bytes"}

BLOCK = re.compile(
    r"^message\s+(\w+)\s*\{\}|^(message|enum|service)\s+(\w+)\s*\{(.*?)^\}", re.MULTILINE | re.DOTALL
)
ONEOF = re.compile(r"oneof\s+(\w+)\s*\{(.*?)\}", re.DOTALL)
FIELD = re.compile(r"(optional |repeated )?(map<\w+, \w+>|[\w.]+) (\w+) = (\d+);")
ENUM_VALUE = re.compile(r"(\w+) = (\d+);")
METHOD = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\)")


def declared_contract(text: str) -> wire_fields.Contract:
    """What a proto file of this repository declares, read without the generator."""
    text = re.sub(r"//.*", "", text)
    package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)
    assert package is not None
    prefix = package.group(1) + "."

    def field_text(label: str, type_name: str, name: str, oneof: str | None) -> str:
        where = f"oneof {oneof}: " if oneof else label
        return f"{where}{type_name if type_name in SCALARS else prefix + type_name} {name}"

    contract: wire_fields.Contract = {}
    for empty_name, kind, name, body in BLOCK.findall(text):
        owner = prefix + (name or empty_name)
        if kind == "enum":
            contract[owner] = {number: value for value, number in ENUM_VALUE.findall(body)}
        elif kind == "service":
            contract[owner] = {
                method: f"{prefix}{takes} -> {stream}{prefix}{gives}"
                for method, takes, stream, gives in METHOD.findall(body)
            }
        else:
            fields = {}
            for oneof, members in ONEOF.findall(body):
                for label, type_name, field, number in FIELD.findall(members):
                    fields[number] = field_text(label, type_name, field, oneof)
            for label, type_name, field, number in FIELD.findall(ONEOF.sub("", body)):
                if map_types := re.fullmatch(r"map<(\w+), (\w+)>", type_name):
                    entry = f"{(name or empty_name)}.{field.title().replace('_', '')}Entry"
                    contract[prefix + entry] = {
                        "1": field_text("", map_types.group(1), "key", None),
                        "2": field_text("", map_types.group(2), "value", None),
                    }
                    fields[number] = field_text("repeated ", entry, field, None)
                else:
                    fields[number] = field_text(label, type_name, field, None)
            contract[owner] = fields
    return contract


def test_generated_code_says_what_the_proto_file_says() -> None:
    assert wire_fields.contract_of(pb.DESCRIPTOR) == declared_contract(PROTO.read_text())


def test_an_edit_without_regenerating_is_noticed() -> None:
    text = PROTO.read_text()
    generated = wire_fields.contract_of(pb.DESCRIPTOR)
    for old, new in [
        ("uint32 h = 2;", "uint64 h = 2;"),
        ("bool retryable = 4;", "bool retryable = 44;"),
        ("MODALITY_VIDEO = 2;", "MODALITY_CLIP = 2;"),
        ("returns (stream ItemEvent)", "returns (ItemEvent)"),
        ("optional double fps", "double fps"),
    ]:
        assert old in text
        assert declared_contract(text.replace(old, new)) != generated


def test_generated_service_has_every_method() -> None:
    methods = set(pb.DESCRIPTOR.services_by_name["VisionEncoder"].methods_by_name)
    assert methods == {
        name for name in vars(encoder_pb2_grpc.VisionEncoderServicer) if not name.startswith("_")
    }


@pytest.mark.parametrize("name", ["encoder_pb2.py", "encoder_pb2_grpc.py"])
def test_each_generated_module_has_its_stub(name: str) -> None:
    assert (PROTO.parent / name).with_suffix(".pyi").stat().st_size > 0


def test_enum_zero_is_unspecified() -> None:
    enums = pb.DESCRIPTOR.enum_types_by_name
    assert len(enums) == 5
    for name, enum in enums.items():
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        assert enum.values_by_number[0].name == f"{snake}_UNSPECIFIED"
        assert all(value.name.startswith(f"{snake}_") for value in enum.values)


def test_no_recorded_number_changed_or_went() -> None:
    problems = wire_fields.broken_entries(
        wire_fields.read_golden(),
        wire_fields.contract_of(pb.DESCRIPTOR),
        wire_fields.reserved_numbers(pb.DESCRIPTOR),
    )
    assert problems == []


def test_every_number_is_recorded() -> None:
    missing = wire_fields.missing_entries(wire_fields.read_golden(), wire_fields.contract_of(pb.DESCRIPTOR))
    assert missing == [], "record additions: PYTHONPATH=proto python tests/contract/wire_fields.py"


def test_the_record_catches_change_removal_and_reuse() -> None:
    recorded = {"v1.A": {"1": "bytes key", "2": "uint32 rows"}, "v1.B": {"1": "bool ok"}}
    broken = wire_fields.broken_entries
    assert broken(recorded, recorded, {}) == []
    assert broken(
        recorded, {"v1.A": {"1": "bytes key", "2": "uint64 rows"}, "v1.B": {"1": "bool ok"}}, {}
    ) == ["v1.A 2 was 'uint32 rows', is 'uint64 rows'"]
    removed = {"v1.A": {"1": "bytes key"}, "v1.B": {"1": "bool ok"}}
    assert broken(recorded, removed, {"v1.A": {"2"}}) == []
    assert broken(recorded, removed, {}) == ["v1.A 2 (uint32 rows) is gone and its number is not reserved"]
    assert broken(recorded, {"v1.A": recorded["v1.A"]}, {}) == ["v1.B is gone"]


# One message of every kind that passes between the two sides, each kind of content and of rows among them.
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
                        stride_bytes=[3072, -2],
                        unlink_after_read=True,
                    ),
                ),
            ),
            pb.Item(modality=pb.MODALITY_IMAGE, content_digest=b"\xaa" * 32, digest_only=pb.DigestOnly()),
        ],
        namespace="tenant",
        model="qwen",
        delivery=pb.DELIVERY_INLINE,
        priority=7,
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
    "host_result": pb.ItemEvent(
        result=pb.ItemResult(
            host=pb.HostRows(
                segment="ve-rows-0",
                offset_bytes=8192,
                generation=5,
                lease_id=b"\x33" * 16,
                expires_at_unix_ms=1,
            )
        )
    ),
    "lease_result": pb.ItemEvent(
        result=pb.ItemResult(
            tier=pb.CACHE_TIER_DEVICE,
            lease=pb.DeviceLease(
                lease_id=b"\x44" * 16,
                arena_id=b"\x55" * 16,
                offset_bytes=1 << 32,
                shape=[768, 16384],
                dtype=pb.DTYPE_BFLOAT16,
                generation=9,
                expires_at_unix_ms=1700000000000,
                device_uuid="GPU-0",
            ),
        )
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


def test_every_recorded_message_is_checked() -> None:
    assert set(json.loads(GOLDEN_MESSAGES.read_text())) == set(MESSAGES)


def test_a_reader_tolerates_fields_and_enum_values_of_a_later_version() -> None:
    known = pb.GridTHW(t=1, h=2, w=3).SerializeToString()
    later = known + bytes([0xF8, 0x3F, 0x05])  # field 1023, varint 5
    grid = pb.GridTHW.FromString(later)
    assert (grid.t, grid.h, grid.w) == (1, 2, 3)
    assert grid.SerializeToString() == later, "an intermediary must not drop what it does not know"

    status = pb.KeyStatus.FromString(bytes([0x10, 0x63]))  # state = 99
    assert status.state == 99
    assert status.state not in pb.KeyState.values()


def test_an_absent_option_differs_from_zero() -> None:
    options = pb.EncodeRequest.FromString(MESSAGES["encode_request"].SerializeToString()).items[0].options
    assert options.HasField("max_patches")
    assert options.max_patches == 0
    assert not options.HasField("max_patches_per_side")


def test_package_carries_its_major_version() -> None:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    assert file.package == "vision_encoder.v1"
    assert file.syntax == "proto3"
    assert list(file.dependency) == []
