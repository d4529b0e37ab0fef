"""What the adapter exports, what it needs, and where it meets the service's conventions."""

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
from encoder_service.rpc import status as service_status
from lm_adapter import convert, errors, session
from vision_encoder.v1 import encoder_pb2 as pb

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = ["lm_adapter"] + [
    f"lm_adapter.{path.stem}"
    for path in sorted((ROOT / "lm_adapter").glob("*.py"))
    if path.name != "__init__.py" and "\n__all__ = [" in path.read_text()
]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_names_are_there_sorted_and_once(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == sorted(set(module.__all__))
    for exported in module.__all__:
        assert hasattr(module, exported), exported


# In a fresh interpreter: an encode against the fake, with numpy, grpc and protobuf only.
WITHOUT_HEAVY = """
import sys
BLOCKED = {"torch", "fastapi", "transformers", "triton", "encoder_service", "pydantic", "blake3", "PIL"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is out of reach")
sys.meta_path.insert(0, Refuse())
from lm_adapter import ImageItem, VisionEncoderClient
from lm_adapter.testing import FakeEncoder, fake_rows
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    rows = client.encode_one(ImageItem(b"x", digest=b"d" * 32))
    assert (rows.numpy() == fake_rows(b"d" * 32, rows.num_rows, rows.width)).all()
print(sorted(BLOCKED & set(sys.modules)))
"""


def test_it_encodes_with_everything_heavy_out_of_reach() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_HEAVY],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


def test_p35_both_sides_speak_a_common_protocol_version() -> None:
    assert session.MIN_PROTOCOL_VERSION <= service_convert.PROTOCOL_VERSION
    assert service_convert.MIN_PROTOCOL_VERSION <= session.PROTOCOL_VERSION
    assert errors.FAILURE_METADATA_KEY == service_status.FAILURE_METADATA_KEY
    assert lm_adapter.__version__ == encoder_service.__version__


def test_values_of_the_contract_have_names_and_unknown_ones_are_read() -> None:
    assert not any(convert.dtype_name(number).startswith("dtype ") for number in pb.DType.values() if number)
    assert all(convert.tier(number).value != "unknown" for number in pb.CacheTier.values() if number)
    assert all(convert.key_state(number).value != "unknown" for number in pb.KeyState.values() if number)
    info = convert.server_info(
        pb.GetServerInfoResponse(
            models=[pb.ModelInfo(dtype=50, modalities=[1, 60])],  # type: ignore[arg-type, list-item]
            transports=[pb.TransportInfo(delivery=70)],  # type: ignore[arg-type]
        )
    )
    assert info.models[0].dtype == "dtype 50"
    assert [modality.value for modality in info.models[0].modalities] == ["image"]
    assert (convert.tier(99).value, convert.key_state(99).value) == ("unknown", "unknown")


def test_every_announced_field_reaches_the_caller() -> None:
    from lm_adapter.types import Limits, ModelInfo, StageTimings

    for record, message in ((ModelInfo, pb.ModelInfo), (Limits, pb.Limits), (StageTimings, pb.StageTimings)):
        assert set(record.__dataclass_fields__) == {field.name for field in message.DESCRIPTOR.fields}
