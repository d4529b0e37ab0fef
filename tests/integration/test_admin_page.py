"""The admin page in a real Chromium (Debian's package ``chromium``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lm_adapter import ImageItem, VisionEncoderClient
from tests.integration.browser import Page, browsing, find_browser
from tests.integration.conftest import RunningService, Serve
from tests.integration.images import photo
from tests.programs import ARE_REQUIRED

pytestmark = pytest.mark.without_device

PHOTO = Path(__file__).parents[1] / "data" / "photos" / "coffee.jpg"
# The marks of the latency chart that show something.
DRAWN = "[...document.querySelectorAll('#chart-latency path.dot')].filter((dot) => dot.getAttribute('d'))"
MAX_BYTES = PHOTO.stat().st_size + 1000


@pytest.fixture(scope="module")
def served(serve: Serve, device) -> Iterator[RunningService]:  # type: ignore[no-untyped-def]
    with serve(max_encoded_bytes=MAX_BYTES, playground=True) as found:
        yield found


@pytest.fixture(scope="module")
def page(served: RunningService) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        (pytest.fail if ARE_REQUIRED else pytest.skip)("chromium is not installed")
    with browsing(browser) as page:
        page.go(address(served))
        page.until("document.querySelector('#state').textContent === 'ready'")
        yield page


def address(served: RunningService) -> str:
    return f"http://{served.service.addresses['admin']}/"


def text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({selector!r}).innerText"))


def test_the_first_latency_is_drawn_and_is_the_observed_one(served: RunningService, page: Page) -> None:
    """To the digit, and not between two bounds of a histogram."""
    with VisionEncoderClient(served.target, timeout_s=60) as client:
        client.encode([ImageItem(photo())])
    page.until(f"({DRAWN}).length === 2")  # a dot for each percentile
    total = httpx.get(f"{address(served)}v1/times").json()["stages"]["total"]
    digits = 2 if total["p99"] < 10 else 1 if total["p99"] < 100 else 0
    assert total["p50"] == total["p99"]
    assert f"{total['p99']:.{digits}f} ms" in text(page, "#tiles")
    assert "1 batch;" in text(page, "#buckets")


def test_a_reload_keeps_the_charts(served: RunningService, page: Page) -> None:
    page.go("about:blank")
    page.go(address(served))
    page.until(f"({DRAWN}).length === 2")


def test_live_figures_move_with_the_calls(served: RunningService, page: Page) -> None:
    data = photo()
    with VisionEncoderClient(served.target, timeout_s=60) as client:
        client.encode([ImageItem(data), ImageItem(photo()), ImageItem(b"bad")])
        client.encode([ImageItem(data)])
    for selector, shown in (
        ("#failures", "UNDECODABLE_IMAGE"),
        ("#stages", "total"),
        ("#cache", "found in the host tier\\t1"),
        ("#reads", "delivered inline\\t4"),
    ):
        page.until(f"document.querySelector('{selector}').innerText.includes('{shown}')")
    assert "qwen3_vl" in text(page, "#model")
    page.until("document.querySelectorAll('#chart-items path').length === 5")  # two lines, dots, an area


def test_an_image_is_shown_with_its_grid_tokens_and_colours(page: Page) -> None:
    page.choose_file("#file", PHOTO)
    page.until("!document.getElementById('result').hidden")
    facts = text(page, "#facts")
    assert "encoded" in facts
    assert "608 × 384 px" in facts
    assert "1 × 24 × 38 of 16 px = 912 patches" in facts
    assert "228 (2 × 2 patches each)" in facts
    assert "tower" in text(page, "#timings")
    assert page.run("[picture.width, picture.height]") == [608, 384]
    # Neither canvas is one flat colour, and the grid changes the picture.
    distinct = "new Set(new Uint32Array({}.getContext('2d').getImageData(0, 0, 608, 384).data.buffer)).size"
    assert page.run(distinct.format("picture")) > 1000
    assert page.run(distinct.format("colours")) > 50
    with_grid = page.run("picture.toDataURL()")
    page.run("document.getElementById('show-grid').click()")
    assert page.run("picture.toDataURL()") != with_grid
    page.run("document.getElementById('show-grid').click()")
    page.choose_file("#file", PHOTO)
    page.until("document.getElementById('facts').innerText.includes('found in the host tier')")


def test_a_dropped_file_is_sent_and_a_refusal_shown(page: Page) -> None:
    drop = (
        "(() => {{ const data = new DataTransfer();"
        "data.items.add(new File([{}], 'dropped.png'));"
        "document.getElementById('drop').dispatchEvent("
        "new DragEvent('drop', {{dataTransfer: data, bubbles: true, cancelable: true}})); }})()"
    )
    assert not page.run("document.getElementById('result').hidden")
    page.run(drop.format("'no image'"))
    page.until("document.getElementById('play-error').innerText.includes('UNDECODABLE_IMAGE')")
    # Nothing is left of the picture before.
    assert page.run("document.getElementById('result').hidden")
    page.run(drop.format(f"new Uint8Array({MAX_BYTES + 10_000})"))
    page.until("document.getElementById('play-error').innerText.includes('BODY_TOO_LARGE')")


def test_when_the_playground_is_off_the_page_says_how_it_is_switched_on(
    service: RunningService, page: Page
) -> None:
    page.go(address(service))
    page.until("!document.getElementById('playground-off').hidden")
    assert "--playground" in text(page, "#playground")
    assert page.run("document.getElementById('drop').hidden")
    page.go("about:blank")


def test_no_other_host_was_asked_and_nothing_was_complained_about(
    served: RunningService, service: RunningService, page: Page
) -> None:
    allowed = (address(served), address(service), "data:", "blob:", "about:")
    assert [url for url in page.requests if not url.startswith(allowed)] == []
    # A refused upload is an answer of 400 or 413, which the browser notes.
    assert [problem for problem in page.problems if "v1/playground" not in problem] == []
