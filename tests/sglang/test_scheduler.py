"""SGLang as it comes, with `--encoder-transfer-backend zmq_to_scheduler`: its scheduler receives the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.harness.sglang import FORKED, Encoder, Sglang, language_model_arguments, protocol_arguments
from bench.harness.waiting import wait_until
from tests.sglang.reference import IMAGE, Reference, prompt

FAMILY = "qwen3_vl"
ONE = prompt(IMAGE, "What is in the picture?")
TWO = prompt(IMAGE, "and", IMAGE, "Compare the two.")

pytestmark = [
    pytest.mark.extended,
    pytest.mark.parametrize("family", [FAMILY], indirect=True, scope="session"),
]


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, encoder: Encoder, other_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sglang]:
    urls = f"{encoder.sglang_url} {other_encoder.sglang_url}"
    by_scheduler = protocol_arguments(urls, zmq_to_tokenizer="zmq_to_scheduler")
    arguments = [*language_model_arguments(FAMILY), *by_scheduler]
    with Sglang(checkpoint, tmp_path_factory.mktemp("scheduler"), arguments, FORKED) as running:
        yield running


def test_tokens_are_those_of_the_whole_model(
    server: Sglang, reference: Reference, images: list[bytes]
) -> None:
    for text, chosen in ((ONE, images[:1]), (TWO, images[1:]), (TWO, [images[0]] * 2), (TWO, images[:2])):
        assert server.tokens(text, chosen) == reference.tokens(text, chosen)


def test_p40_a_refused_image_fails_its_request_where_the_prompt_has_ids(
    server: Sglang, reference: Reference, images: list[bytes]
) -> None:
    """The client gets the encoder's reason."""
    ids = reference.ids(ONE, [])
    refused = server.generate(ids, [images[0][:200]])
    assert refused.status_code == 400, refused.text
    assert "damaged" in refused.text
    assert server.tokens(ids, images[:1]) == reference.tokens(ONE, images[:1])


def test_p40_a_refused_image_ends_sglang_where_the_prompt_is_text(
    server: Sglang, images: list[bytes]
) -> None:
    """The warning of docs/sglang.md: once this fails, the warning may go. The last test of the server."""
    with pytest.raises(httpx.TransportError):
        server.generate(ONE, [images[0][:200]])
    wait_until(lambda: not server.is_running, "the server's end")
    assert "object of type 'NoneType' has no len()" in server.log
