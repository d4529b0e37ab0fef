"""The wire contract as data: fields by number, enum values by number, methods.

Owns the records in golden/. Run as a program, it adds what is new in the proto files and refuses what breaks
them; a record that was deleted is written anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

GOLDEN = Path(__file__).parent / "golden" / "encoder_v1_fields.json"
BROKER_GOLDEN = GOLDEN.with_name("broker_v1_fields.json")

# Full name of a message, enum or service -> number (or method name) -> what stands there.
Contract: TypeAlias = dict[str, dict[str, str]]

RESERVED = "reserved"
TYPE_NAMES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def field_text(field: FieldDescriptor) -> str:
    """One field as in a proto file, without its number: ``repeated bytes keys``."""
    named = field.message_type or field.enum_type
    type_name = named.full_name if named else TYPE_NAMES[field.type]
    oneof = field.containing_oneof
    label = "repeated " if field.is_repeated else ""
    if oneof is not None:
        label = "optional " if oneof.name.startswith("_") else f"oneof {oneof.name}: "
    return f"{label}{type_name} {field.name}"


def messages_in(file: FileDescriptor) -> Iterator[Descriptor]:
    """Every message, nested ones included."""
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        yield message
        waiting.extend(message.nested_types)


def contract_of(file: FileDescriptor) -> Contract:
    """The whole contract of one proto file; reserved numbers included."""
    contract: Contract = {}
    for message in messages_in(file):
        proto = DescriptorProto()
        message.CopyToProto(proto)
        spans = (range(span.start, span.end) for span in proto.reserved_range)
        contract[message.full_name] = {str(number): RESERVED for span in spans for number in span}
        contract[message.full_name] |= {str(field.number): field_text(field) for field in message.fields}
    proto_file = FileDescriptorProto()
    file.CopyToProto(proto_file)
    for enum in proto_file.enum_type:
        spans = (range(span.start, span.end + 1) for span in enum.reserved_range)
        entries = {str(number): RESERVED for span in spans for number in span}
        contract[f"{file.package}.{enum.name}"] = entries | {
            str(value.number): value.name for value in enum.value
        }
    for service in file.services_by_name.values():
        contract[service.full_name] = {
            method.name: f"{method.input_type.full_name} -> "
            f"{'stream ' if method.server_streaming else ''}{method.output_type.full_name}"
            for method in service.methods
        }
    return contract


def broken_entries(recorded: Contract, current: Contract) -> list[str]:
    """What the current contract breaks of the recorded one: a number may become reserved, nothing else."""
    return [
        f"{owner} {number} was '{text}', is '{current.get(owner, {}).get(number, 'gone')}'"
        for owner, entries in recorded.items()
        for number, text in entries.items()
        if current.get(owner, {}).get(number) not in (text, RESERVED)
    ]


def read_golden(golden: Path = GOLDEN) -> Contract:
    contract: Contract = json.loads(golden.read_text())
    return contract


def main() -> None:
    from vision_encoder.v1 import broker_pb2, encoder_pb2

    for golden, file in ((GOLDEN, encoder_pb2.DESCRIPTOR), (BROKER_GOLDEN, broker_pb2.DESCRIPTOR)):
        current = contract_of(file)
        recorded = read_golden(golden) if golden.exists() else {}
        if problems := broken_entries(recorded, current):
            sys.exit("refused, the wire contract only grows:\n" + "\n".join(problems))
        golden.write_text(json.dumps(current, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
