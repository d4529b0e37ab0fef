"""What ``import lm_adapter`` reaches, and what works without the packages that it can do without."""

from __future__ import annotations

from tests.unit.lm_adapter.interpreter import output_of


def test_p10_a_client_encodes_with_the_adapters_own_dependencies() -> None:
    """What needs another package says which one."""
    code = """
import sys
blocked = {"torch", "fastapi", "transformers", "triton", "encoder_service", "pydantic", "PIL"}
sys.modules.update(dict.fromkeys(blocked))  # None: not there
from lm_adapter import DigestItem, ImageItem, MissingDependency, VisionEncoderClient
from lm_adapter.keys import item_key
from lm_adapter.testing import FakeEncoder, fake_model, fake_rows
digest = b"d" * 32
item_key(DigestItem(digest), fake_model())
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    hashed, rows = client.encode([ImageItem(b"x"), ImageItem(b"x", digest=digest)])
print(hashed.content_digest.hex()[:8])
assert (rows.numpy() == fake_rows(digest, rows.num_rows, rows.width)).all()
for call in (lambda: ImageItem.from_array(rows.numpy()), rows.torch):
    try:
        call()
    except MissingDependency as error:
        assert isinstance(error, ImportError)
        print(error)
assert not [name for name in blocked if sys.modules[name] is not None]
"""
    assert output_of(code).splitlines() == [
        "3ae7d805",
        "an image from pixels needs the package pillow, which is not installed",
        "EncodedRows.torch() needs the package torch, which is not installed",
    ]
