"""URL items through the whole service: off by default, fetched once, hashed as files are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blake3 import blake3

from lm_adapter import (
    CacheTier,
    EncodedRows,
    ImageItem,
    ItemFailed,
    Outcome,
    PrefetchStatus,
    PreprocessOptions,
    UrlItem,
    VisionEncoderClient,
)
from tests.integration.conftest import Serve
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.integration.web import Files

pytestmark = pytest.mark.without_device


@pytest.fixture
def images() -> Iterator[Files]:
    with Files() as found:
        yield found


def reason(outcome: Outcome | PrefetchStatus) -> str:
    assert isinstance(outcome, ItemFailed)
    return outcome.reason


def rows(outcome: Outcome) -> EncodedRows:
    assert isinstance(outcome, EncodedRows), outcome
    return outcome


def test_a_list_without_a_network_reaches_nothing_inside(serve: Serve, images: Files) -> None:
    with (
        serve(url_allow=images.base) as found,
        VisionEncoderClient(found.target, timeout_s=60) as client,
    ):
        assert reason(client.encode([UrlItem(f"{images.base}/a")])[0]) == "URL_REFUSED"
    assert not images.requested


def test_urls_are_the_files_that_lie_there(serve: Serve, images: Files) -> None:
    first, second = photo(160, 120), photo(120, 160)
    images.files = {"/a": first, "/b": second, "/large": bytes(400_000), "/broken": first[:300]}
    allowed, digest = f"{images.base}/a", b"d" * 32
    settings = {"url_allow": images.base, "url_networks": "127.0.0.1/32", "max_encoded_bytes": 300_000}
    with (
        serve(**settings) as found,
        VisionEncoderClient(found.target, timeout_s=60) as client,
    ):
        by_url, by_file, smaller, *failed = client.encode(
            [
                UrlItem(allowed),
                ImageItem(first),
                UrlItem(allowed, options=PreprocessOptions(min_pixels=1024, max_pixels=4096)),
                UrlItem(f"{images.base}/gone"),
                UrlItem(f"{images.base}/large"),
                UrlItem(f"{images.base}/broken"),
                UrlItem("http://127.0.0.2/a"),
                UrlItem("ftp://127.0.0.1/a"),  # never sent
            ]
        )
        assert rows(by_url).key == rows(by_file).key
        assert rows(by_url).content_digest == blake3(first).digest()
        assert rows(smaller).num_rows < rows(by_url).num_rows
        assert [reason(outcome) for outcome in failed] == [
            "URL_CONTENT",
            "IMAGE_TOO_LARGE",
            "UNDECODABLE_IMAGE",
            "URL_REFUSED",
            "URL_REFUSED",
        ]
        # The caller's digest counts in its namespace: its rows are found without a fetch.
        miss = client.encode_one(UrlItem(f"{images.base}/b", digest=digest))
        asked = len(images.requested)
        hit = client.encode_one(UrlItem("http://127.0.0.1/whatever", digest=digest))
        assert (miss.content_digest, miss.tier, hit.tier) == (digest, CacheTier.MISS, CacheTier.HOST)
        assert len(images.requested) == asked

        started, refused = client.prefetch([UrlItem(f"{images.base}/b"), UrlItem("http://127.0.0.2/a")])
        assert isinstance(started, PrefetchStatus)
        assert reason(refused) == "URL_REFUSED"
        assert rows(client.fetch([started.key])[0]).content_digest == blake3(second).digest()
        wait_until_free(found)
