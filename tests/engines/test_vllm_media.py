"""vLLM's limits on where images come from hold for files that nobody decodes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lm_adapter.keys import content_digest
from tests.engines.pictures import picture

# Importing vLLM warns of what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, HEIGHT = 60, 40


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder; /moved leads to one of them under the server's other name."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.connection.getsockname()[1]}/a.png")
            self.end_headers()
        else:
            super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Until the client has read enough."""
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)

    def log_message(self, *_: object) -> None:
        """Not into the tests' output."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("media")
    (found / "a.png").write_bytes(picture(1, WIDTH, HEIGHT))
    (found / "no.png").write_bytes(b"no image at all")
    return found


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No encoder is told of the images."""
    from lm_adapter.engines.vllm.api_server.server import ApiServer

    monkeypatch.setattr(ApiServer, "current", None)


def fetch(url: str, **options: Any) -> Any:
    """By both of vLLM's ways, which have to end alike."""
    from vllm.connections import HTTPConnection

    from lm_adapter.engines.vllm.api_server.media import FileMediaConnector

    connection = HTTPConnection()
    connector = FileMediaConnector(connection=connection, **options)

    async def fetch_async() -> Any:
        async with await connection.get_async_client():
            return await connector.fetch_image_async(url)

    try:
        found = connector.fetch_image(url)
    except Exception as error:
        with pytest.raises(type(error), match=re.escape(str(error).partition(" at 0x")[0])):
            asyncio.run(fetch_async())
        raise
    assert asyncio.run(fetch_async()).original_bytes == found.original_bytes
    return found


def assert_whole(found: Any, folder: Path) -> None:
    data = (folder / "a.png").read_bytes()
    assert found.original_bytes == found.media.data == data
    assert found.media.digest == content_digest(data)
    assert (found.media.size, found.media.is_announced) == ((WIDTH, HEIGHT), False)


def test_files_come_from_urls_and_from_the_allowed_folder(url: str, folder: Path) -> None:
    for place, options in (
        (f"{url}/a.png", {}),
        (f"{url}/a.png", {"allowed_media_domains": ["127.0.0.1"]}),
        (f"{url}/moved", {}),
        (f"{url}/a.png", {"media_io_kwargs": {"image": {"image_mode": "RGB"}}}),
        (f"file://{folder}/a.png", {"allowed_local_media_path": str(folder)}),
    ):
        assert_whole(fetch(place, **options), folder)


@pytest.mark.parametrize(
    ("place", "options", "text"),
    [
        ("{url}/a.png", {"allowed_media_domains": ["example.com"]}, r"allowed domains: \['example.com'\]"),
        ("file://{folder}/a.png", {}, "--allowed-local-media-path"),
        ("file:///etc/hostname", {"allowed_local_media_path": "{folder}"}, "must be a subpath"),
        ("file://{folder}/../a.png", {"allowed_local_media_path": "{folder}"}, "must be a subpath"),
        ("{url}/none.png", {}, "HTTP 404"),
        ("{url}/no.png", {}, "cannot identify"),
        ("{url}/a.png", {"media_io_kwargs": {"image": {"image_mode": "L"}}}, r"are \{'image_mode': 'L'\}"),
        (
            "{url}/a.png",
            {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}}},
            r"are \{'rgba_background_color': \[1, 2, 3\]\}",
        ),
    ],
)
def test_what_is_not_allowed_is_refused(
    place: str, options: dict[str, Any], text: str, url: str, folder: Path
) -> None:
    given = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(Exception, match=text):
        fetch(place.format(url=url, folder=folder), **given)


def test_redirects_are_followed_as_vllm_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with pytest.raises(ValueError, match="cannot identify"):  # the answer's empty body
        fetch(f"{url}/moved")


def test_p17_a_file_larger_than_vllm_downloads_is_refused_with_its_limit(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "large.png").write_bytes(picture(1, WIDTH, HEIGHT) + bytes(1 << 20))
    assert len(fetch(f"{url}/large.png").media.data) > 1 << 20
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    assert_whole(fetch(f"{url}/a.png"), folder)
    with pytest.raises(Exception, match="VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB=1"):
        fetch(f"{url}/large.png")


def test_p33_an_image_of_more_pixels_than_vllm_takes_is_refused_with_both_figures(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(WIDTH * HEIGHT))
    assert_whole(fetch(f"{url}/a.png"), folder)
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(WIDTH * HEIGHT - 1))
    with pytest.raises(ValueError, match=r"60x40 \(2400 pixels\) exceed the maximum of 2399"):
        fetch(f"{url}/a.png")
