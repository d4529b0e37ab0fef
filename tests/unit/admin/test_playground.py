"""The playground: its limits, its answer, and colours of bounded work."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from encoder_service.admin import playground as module
from encoder_service.admin.app import create_admin_app
from encoder_service.admin.playground import NAMESPACE, Playground, rows_as_colours
from encoder_service.errors import NotReady, QueueFull
from encoder_service.ops import http_server
from encoder_service.ops.http_server import HttpLimits, RequestLimits
from encoder_service.ops.metrics import Metrics
from encoder_service.types import EncodedFile, Item, Modality
from tests.fakes import fake_image
from tests.unit.service.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.end()


@pytest.fixture
def playground(rig: Rig) -> Playground:
    found = Playground(4096)
    found.attach(rig.pipeline)
    return found


async def test_the_answer_of_an_image(playground: Playground) -> None:
    told = await playground.explain(fake_image(8, 12))
    assert told["grid_thw"] == [1, 8, 12]
    assert (told["target_width"], told["target_height"]) == (12, 8)
    assert (told["num_patches"], told["num_rows"]) == (96, 24)
    assert told["tier"] == "miss"
    assert told["timings"]["tower_ms"] > 0
    assert told["picture"].startswith("data:image/jpeg;base64,")
    assert (told["colours"]["width"], told["colours"]["height"]) == (6, 4)
    assert len(base64.b64decode(told["colours"]["rgb"])) == 3 * 24
    assert (await playground.explain(fake_image(8, 12)))["tier"] == "host"


async def test_p18_it_reveals_nothing_of_what_others_have_cached(rig: Rig, playground: Playground) -> None:
    data = fake_image(4, 4, 99)
    (await rig.pipeline.encode(Item(Modality.IMAGE, EncodedFile(data)))).release()
    assert (await playground.explain(data))["tier"] == "miss"
    assert len(NAMESPACE) < 256


async def test_without_a_pipeline_it_is_not_ready() -> None:
    with pytest.raises(NotReady):
        await Playground(10).explain(b"")


async def test_the_third_at_a_time_is_turned_away(rig: Rig, playground: Playground) -> None:
    rig.fake.gate.clear()
    running = [asyncio.ensure_future(playground.explain(fake_image(4, 4, value))) for value in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="at most 2"):
        await playground.explain(fake_image(4, 4, 3))
    rig.fake.gate.set()
    await asyncio.gather(*running)
    await playground.explain(fake_image(4, 4, 3))


# -- over HTTP -----------------------------------------------------------------------------------------


def web(playground: Playground | None = None) -> httpx.AsyncClient:
    readiness: Any = SimpleNamespace(is_alive=lambda: True, not_ready=None)
    max_bytes = 0 if playground is None else playground.max_bytes
    app = RequestLimits(
        create_admin_app(readiness, Metrics(), playground), HttpLimits(16, max_bytes, 4 * max_bytes)
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


UPLOAD = {"content-type": "application/octet-stream"}


async def test_errors_carry_their_reason_and_leave_nothing_behind(rig: Rig, playground: Playground) -> None:
    async with web(playground) as client:
        for body, headers, status, reason in (
            (fake_image(4, 4), UPLOAD, 200, None),
            (b"no image", UPLOAD, 400, "UNDECODABLE_IMAGE"),
            (bytes(5000), UPLOAD, 413, "BODY_TOO_LARGE"),
            (fake_image(32, 32), UPLOAD, 400, "IMAGE_TOO_LARGE"),  # 1024 patches, as of every item
            # What a form of any page elsewhere could send.
            (fake_image(4, 4), {"content-type": "text/plain"}, 400, "INVALID_INPUT"),
            (fake_image(4, 4), {"content-type": "multipart/form-data"}, 400, "INVALID_INPUT"),
        ):
            answer = await client.post("/v1/playground", content=body, headers=headers)
            assert (answer.status_code, answer.json().get("reason")) == (status, reason)
    assert (rig.pipeline.admission.num_bytes, rig.pipeline.admission.num_patches) == (0, 0)


async def test_it_is_off_unless_it_is_asked_for() -> None:
    async with web() as client:
        assert (await client.post("/v1/playground", content=b"", headers=UPLOAD)).status_code == 404


async def test_a_body_without_a_length_is_not_read_beyond_the_limit(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1024
            assert sent < 1 << 20
            await asyncio.sleep(0)
            yield bytes(1024)

    monkeypatch.setattr(http_server, "LINGER_S", 0)
    async with web(playground) as client:
        answer = await client.post("/v1/playground", content=endless(), headers=UPLOAD)
    assert answer.status_code == 413
    assert "5120 bytes or more, at most 4096 are taken" in answer.json()["message"]


async def test_a_full_service_answers_with_a_retry_time(rig: Rig, playground: Playground) -> None:
    permit = rig.pipeline.admission.acquire(4090)
    async with web(playground) as client:
        answer = await client.post("/v1/playground", content=fake_image(4, 4), headers=UPLOAD)
    permit.release()
    assert (answer.status_code, answer.json()["reason"]) == (503, "QUEUE_FULL")
    assert int(answer.headers["retry-after"]) >= 1


# -- colours -------------------------------------------------------------------------------------------


def test_the_colours_are_the_principal_components() -> None:
    """Against numpy's singular vectors, up to each component's sign."""
    rng = np.random.default_rng()
    rows = rng.normal(size=(300, 40)) * np.linspace(9, 0.1, 40)
    found = rows_as_colours(torch.tensor(rows, dtype=torch.float32)).astype(float)
    centred = rows - rows.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    for channel in range(3):
        score = centred @ directions[channel]
        assert abs(np.corrcoef(score, found[:, channel])[0, 1]) > 0.97


def test_rows_that_do_not_differ_are_grey_and_nan_is_survived() -> None:
    assert (rows_as_colours(torch.ones(10, 8)) == 127).all()
    rows = torch.randn(10, 8)
    rows[3, 3] = float("nan")
    assert rows_as_colours(rows).shape == (10, 3)
    assert rows_as_colours(torch.randn(1, 8)).tolist() == [[127, 127, 127]]


def test_the_components_are_fitted_to_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    plain = np.linalg.eigh

    def watched(matrix: np.ndarray) -> Any:
        seen.append(matrix.shape)
        return plain(matrix)

    monkeypatch.setattr(np.linalg, "eigh", watched)
    assert rows_as_colours(torch.randn(5000, 16)).shape == (5000, 3)
    assert seen[0][0] <= module.MAX_FITTED_ROWS
