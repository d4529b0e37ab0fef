"""What ``import lm_adapter`` reaches, and what works without the packages that it can do without."""

from __future__ import annotations

from tests.unit.lm_adapter.interpreter import output_of


def test_importing_the_adapter_reaches_nothing_heavy() -> None:
    code = (
        "import sys, lm_adapter\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'triton', 'cuda', 'blake3', 'encoder_service')\n"
        "assert not [n for n in sys.modules if n.partition('.')[0] in heavy]\n"
    )
    output_of(code)


def test_p10_with_numpy_grpc_and_protobuf_alone_a_client_encodes_but_hashes_nothing() -> None:
    """What needs another package says which one."""
    code = """
import sys
blocked = {"torch", "fastapi", "transformers", "triton", "encoder_service", "pydantic", "blake3", "PIL"}
sys.modules.update(dict.fromkeys(blocked))  # None: not there
from lm_adapter import DigestItem, ImageItem, MissingDependency, VisionEncoderClient
from lm_adapter.keys import content_digest, item_key
from lm_adapter.testing import FakeEncoder, fake_model, fake_rows
digest = b"d" * 32
item_key(DigestItem(digest), fake_model())
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    unhashed, rows = client.encode([ImageItem(b"x"), ImageItem(b"x", digest=digest)])
print(unhashed.reason)
assert (rows.numpy() == fake_rows(digest, rows.num_rows, rows.width)).all()
for call in (lambda: content_digest(b"x"), rows.torch):
    try:
        call()
    except MissingDependency as error:
        assert isinstance(error, ImportError)
        print(error)
assert not [name for name in blocked if sys.modules[name] is not None]
"""
    assert output_of(code).splitlines() == [
        "MISSING_DEPENDENCY",
        "hashing content needs the package blake3, which is not installed",
        "EncodedRows.torch() needs the package torch, which is not installed",
    ]
