"""The wire contract as data: fields by number, enum values by number, methods.

Owns the records that the golden files hold. Run as a program, it adds what is new in the proto files to
them; it refuses to change or drop what is recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

GOLDEN = Path(__file__).parent / "golden" / "encoder_v1_fields.json"
BROKER_GOLDEN = GOLDEN.with_name("broker_v1_fields.json")

# Full name of a message, enum or service -> number (or method name) -> what stands there.
Contract: TypeAlias = dict[str, dict[str, str]]

TYPE_NAMES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def field_text(field: FieldDescriptor) -> str:
    """One field as it would stand in a proto file, without its number: ``repeated bytes keys``."""
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
    """The whole contract of one proto file."""
    contract: Contract = {}
    for message in messages_in(file):
        contract[message.full_name] = {str(field.number): field_text(field) for field in message.fields}
    for enum in file.enum_types_by_name.values():
        contract[enum.full_name] = {str(value.number): value.name for value in enum.values}
    for service in file.services_by_name.values():
        contract[service.full_name] = {
            method.name: f"{method.input_type.full_name} -> "
            f"{'stream ' if method.server_streaming else ''}{method.output_type.full_name}"
            for method in service.methods
        }
    return contract


def broken_entries(recorded: Contract, current: Contract, reserved: dict[str, set[str]]) -> list[str]:
    """What the current contract breaks of the recorded one. A removed field is fine once its number is
    reserved; a changed one never is."""
    problems = []
    for owner, entries in recorded.items():
        if owner not in current:
            problems.append(f"{owner} is gone")
            continue
        for number, text in entries.items():
            found = current[owner].get(number)
            if found is None and number not in reserved.get(owner, set()):
                problems.append(f"{owner} {number} ({text}) is gone and its number is not reserved")
            if found is not None and found != text:
                problems.append(f"{owner} {number} was '{text}', is '{found}'")
    return problems


def missing_entries(recorded: Contract, current: Contract) -> list[str]:
    """What the current contract has and the record lacks."""
    return [
        f"{owner} {number} ({text})"
        for owner, entries in current.items()
        for number, text in entries.items()
        if number not in recorded.get(owner, {})
    ]


def reserved_numbers(file: FileDescriptor) -> dict[str, set[str]]:
    """Reserved numbers by message or enum, from the file's own descriptor."""
    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    reserved: dict[str, set[str]] = {}

    def visit(message: DescriptorProto, prefix: str) -> None:
        name = f"{prefix}.{message.name}"
        reserved[name] = {
            str(number) for span in message.reserved_range for number in range(span.start, span.end)
        }
        for nested in message.nested_type:
            visit(nested, name)

    def visit_enum(enum: EnumDescriptorProto) -> None:
        reserved[f"{proto.package}.{enum.name}"] = {
            str(number) for span in enum.reserved_range for number in range(span.start, span.end + 1)
        }

    for message in proto.message_type:
        visit(message, proto.package)
    for enum in proto.enum_type:
        visit_enum(enum)
    return reserved


def read_golden(golden: Path = GOLDEN) -> Contract:
    contract: Contract = json.loads(golden.read_text())
    return contract


def record(file: FileDescriptor, golden: Path) -> None:
    """Adds what is new in the file to its record. Exits when something recorded changed."""
    current = contract_of(file)
    recorded = read_golden(golden) if golden.exists() else {}
    if problems := broken_entries(recorded, current, reserved_numbers(file)):
        sys.exit("refused, the wire contract only grows:\n" + "\n".join(problems))
    for owner, entries in current.items():
        recorded.setdefault(owner, {}).update(entries)
    golden.parent.mkdir(exist_ok=True)
    golden.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")


def main() -> None:
    from vision_encoder.v1 import broker_pb2, encoder_pb2

    record(encoder_pb2.DESCRIPTOR, GOLDEN)
    record(broker_pb2.DESCRIPTOR, BROKER_GOLDEN)


if __name__ == "__main__":
    main()
