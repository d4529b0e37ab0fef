"""The playground's calls: what they show, their limits, and colours of bounded work."""

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

from encoder_service.admin.app import create_admin_app
from encoder_service.http import explained as module
from encoder_service.http.explained import NAMESPACE, rows_as_colours
from encoder_service.ops.metrics import Metrics
from encoder_service.types import EncodedFile, Item, Modality
from tests.fakes import fake_image
from tests.unit.http.endpoint_rig import pipeline_rig, playground, post
from tests.unit.service.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = pipeline_rig()
    yield rig
    await rig.end()


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with playground(rig).attach().client() as found:
        yield found


async def test_the_answer_of_an_image(client: httpx.AsyncClient) -> None:
    (item,) = (await post(client, fake_image(8, 12))).json()["items"]
    assert item["grid_thw"] == [1, 8, 12]
    assert (item["target_width"], item["target_height"]) == (12, 8)
    assert (item["num_patches"], item["num_rows"]) == (96, 24)
    assert item["tier"] == "miss"
    assert item["timings"]["tower_ms"] > 0
    assert item["picture"].startswith("data:image/jpeg;base64,")
    assert (item["colours"]["width"], item["colours"]["height"]) == (6, 4)
    assert len(base64.b64decode(item["colours"]["rgb"])) == 3 * 24
    (item,) = (await post(client, fake_image(8, 12))).json()["items"]
    assert item["tier"] == "host"


async def test_p18_it_reveals_nothing_of_what_others_have_cached(rig: Rig, client: httpx.AsyncClient) -> None:
    """Whatever namespace the page's call names."""
    data = fake_image(4, 4, 99)
    (await rig.pipeline.encode(Item(Modality.IMAGE, EncodedFile(data)))).release()
    answer = await post(client, data, data={"namespace": ""})
    assert answer.json()["items"][0]["tier"] == "miss"
    assert len(NAMESPACE) < 256


async def test_the_third_at_a_time_is_turned_away(rig: Rig, client: httpx.AsyncClient) -> None:
    rig.fake.gate.clear()
    running = [asyncio.ensure_future(post(client, fake_image(4, 4, value))) for value in (1, 2)]
    while rig.fake.num_opened < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    refused = await post(client, fake_image(4, 4, 3))
    assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "TOO_MANY_CALLS")
    rig.fake.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await post(client, fake_image(4, 4, 3))).status_code == 200


async def test_the_token_of_the_admin_plane_is_not_taken_for_a_namespace_s(client: httpx.AsyncClient) -> None:
    """Browsers send it as HTTP Basic, which is no token of a namespace."""
    assert (await post(client, fake_image(4, 4), auth=("anyone", "token"))).status_code == 200


async def test_it_is_off_unless_it_is_asked_for(rig: Rig) -> None:
    readiness: Any = SimpleNamespace(is_alive=lambda: True, not_ready=None)
    for is_on in (True, False):
        found = playground(rig).attach()
        app = create_admin_app(readiness, Metrics(), found.endpoint if is_on else None)
        async with found.client(app) as client:
            answer = await client.post("/v1/playground", files={"image": fake_image(4, 4)})
            assert answer.status_code == (200 if is_on else 404)


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
