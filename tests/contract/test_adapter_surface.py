"""What the adapter exports, and where it meets the service's conventions."""

from __future__ import annotations

from types import ModuleType

import pytest

import encoder_service
import lm_adapter
from encoder_service.rpc import convert as service_convert
from lm_adapter import calls, convert, errors, items, keys, testing, types
from vision_encoder.v1 import encoder_pb2 as pb

INTERNAL = {
    *("upcast_bfloat16", "from_rpc_error", "BrokerError", "MappingFailed"),
    *("FileItem", "ShortRepr"),
    *("known_keys", "lacks_digest", "with_digests"),
}


@pytest.mark.parametrize(
    ("module", "exporter"),
    [(keys, keys), (testing, testing), (types, lm_adapter), (errors, lm_adapter), (items, lm_adapter)],
)
def test_what_is_public_is_exported_and_there(module: ModuleType, exporter: ModuleType) -> None:
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert {name for name in defined if not name.endswith("T")} <= {*exporter.__all__, *INTERNAL}
    assert [name for name in exporter.__all__ if not hasattr(exporter, name)] == []


def test_p35_both_sides_speak_a_common_protocol_version() -> None:
    assert calls.MIN_PROTOCOL_VERSION <= service_convert.PROTOCOL_VERSION
    assert service_convert.MIN_PROTOCOL_VERSION <= calls.PROTOCOL_VERSION


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
