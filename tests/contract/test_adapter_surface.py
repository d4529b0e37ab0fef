"""What the adapter exports, what it imports, and where it meets the service's conventions."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import encoder_service
import lm_adapter
from encoder_service.rpc import convert as service_convert
from lm_adapter import client, convert, errors, items, types
from vision_encoder.v1 import encoder_pb2 as pb

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = ["lm_adapter", "lm_adapter.keys", "lm_adapter.testing"]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_names_are_there_sorted_and_said_once(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == sorted(set(module.__all__))
    for exported in module.__all__:
        assert hasattr(module, exported), exported


@pytest.mark.parametrize("name", PUBLIC_MODULES[1:])
def test_all_names_every_public_thing_defined_there(name: str) -> None:
    module = importlib.import_module(name)
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == name and not key.endswith("T")
    }
    assert defined <= set(module.__all__)


def test_the_package_exports_its_types_and_errors() -> None:
    internal = {"upcast_bfloat16", "from_rpc_error", "BrokerError", "MappingFailed"}
    for module in (types, errors, items):
        defined = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        }
        assert defined <= set(lm_adapter.__all__) | internal


def test_it_works_with_everything_heavy_out_of_reach() -> None:
    """Encodes against the fake, with numpy, grpc and protobuf alone."""
    code = """
import sys
BLOCKED = {"torch", "fastapi", "transformers", "triton", "encoder_service", "pydantic", "blake3", "PIL"}
sys.modules.update(dict.fromkeys(BLOCKED))  # None: not there
from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.testing import FakeEncoder, fake_rows
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    rows = client.encode_one(ImageItem(b"x", digest=b"d" * 32))
    assert (rows.numpy() == fake_rows(b"d" * 32, rows.num_rows, rows.width)).all()
print(sorted(name for name in BLOCKED if sys.modules[name] is not None))
"""
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == "[]"


def test_p35_both_sides_speak_a_common_protocol_version() -> None:
    assert client.MIN_PROTOCOL_VERSION <= service_convert.PROTOCOL_VERSION
    assert service_convert.MIN_PROTOCOL_VERSION <= client.PROTOCOL_VERSION


def test_both_sides_have_one_version() -> None:
    assert lm_adapter.__version__ == encoder_service.__version__


def test_every_enum_value_of_the_contract_has_a_name() -> None:
    assert not any(convert.dtype_name(number).startswith("dtype ") for number in pb.DType.values() if number)
    assert all(convert.tier(number).value != "unknown" for number in pb.CacheTier.values() if number)
    assert all(convert.key_state(number).value != "unknown" for number in pb.KeyState.values() if number)
    assert convert.dtype_name(99) == "dtype 99"
    assert convert.tier(99).value == "unknown"
    assert convert.key_state(99).value == "unknown"


def test_every_announced_field_reaches_the_caller() -> None:
    """A field added to the contract's ModelInfo, Limits or StageTimings is not forgotten here."""
    from lm_adapter.types import Limits, ModelInfo, StageTimings

    for record, message in ((ModelInfo, pb.ModelInfo), (Limits, pb.Limits), (StageTimings, pb.StageTimings)):
        assert set(record.__dataclass_fields__) == {field.name for field in message.DESCRIPTOR.fields}


def test_a_server_info_of_unknown_values_is_read() -> None:
    info = convert.server_info(
        pb.GetServerInfoResponse(
            models=[pb.ModelInfo(dtype=50, modalities=[1, 60])],  # type: ignore[arg-type, list-item]
            transports=[pb.TransportInfo(delivery=70)],  # type: ignore[arg-type]
        )
    )
    assert info.models[0].dtype == "dtype 50"
    assert [modality.value for modality in info.models[0].modalities] == ["image"]
    assert info.transports[0].delivery == "delivery 70"
