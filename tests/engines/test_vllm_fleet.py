"""Two encoders behind one vLLM and its front: one may go at any time, and requests are answered."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lm_adapter import FleetClient, ImageItem
from lm_adapter.engines.vllm_items import KeyedItem, read_params, transfer_params
from lm_adapter.types import PrefetchStatus
from tests.engines.agreement import of_response
from tests.engines.conftest import FLEET_FAMILY
from tests.engines.meanwhile import Others
from tests.engines.pictures import Case, picture, with_pixels, with_rows
from tests.engines.processes import Encoder, Stack

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.parametrize("family", [FLEET_FAMILY], indirect=True, scope="session"),
]
ONE = Case("one image", (0, "What is in the picture?"))
TWO = Case("two images", (0, 1, "Compare the two."))


def items_in(body: dict[str, Any]) -> list[KeyedItem]:
    return read_params(body["ec_transfer_params"])[0]


def test_p32_a_replica_killed_between_encode_and_fetch_leaves_the_request_answered(
    stack: Stack, encoders: list[Encoder], meanwhile: Others
) -> None:
    """kill -9 of the one that has the image's rows, before vLLM has heard of the image."""
    by_target = {one.target: one for one in encoders}
    killed: list[Encoder] = []

    def kill_holder(body: dict[str, Any]) -> None:
        killed.append(by_target[items_in(body)[0].replica])
        killed[0].kill()

    assert stack.between is not None
    stack.between.before = [kill_holder]
    num_before = len(stack.between.bodies)
    try:
        response = stack.chat(with_pixels(ONE, [picture(random.getrandbits(32))]))
    finally:
        for one in killed:
            one.start()
    assert response.status_code == 200, response.text
    assert len(of_response(response.json())["tokens"]) == 12
    ((first,), (second,)) = map(items_in, stack.between.bodies[num_before:])
    assert first.key == second.key
    assert first.replica == killed[0].target
    assert {first.replica, second.replica} == set(by_target)


def test_p32_a_replica_killed_under_load_costs_no_request(
    stack: Stack, encoders: list[Encoder], meanwhile: Others
) -> None:
    """Images of both homes, the same ones again, and a kill in the midst of them."""
    images = [picture(random.getrandbits(32)) for _ in range(6)]
    cases = [(ONE, [image]) for image in images * 2] + [
        (TWO, images[number : number + 2]) for number in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(stack.chat, with_pixels(case, shown)) for case, shown in cases]
        asked[1].result()
        encoders[0].kill()
        try:
            answers = [future.result() for future in asked]
        finally:
            encoders[0].start()
    assert [answer.status_code for answer in answers] == [200] * len(cases), [
        answer.text for answer in answers if answer.status_code != 200
    ]


@pytest.mark.parametrize("replica", ["", "127.0.0.1:9"], ids=["no name", "a name that is no replica"])
def test_metadata_only_requests_find_their_rows_at_either_replica(
    replica: str, stack: Stack, encoders: list[Encoder]
) -> None:
    """Also where the request says nothing of the replica, or nonsense."""
    with FleetClient([one.target for one in encoders]) as client:
        client.wait_ready(30, num_replicas=len(encoders))
        for one in encoders:
            others = [other.target for other in encoders if other is not one]
            (status,) = client.prefetch([ImageItem(picture(random.getrandbits(32)))], avoid=others)
            assert isinstance(status, PrefetchStatus)
            assert status.target == one.target
            assert status.grid_thw is not None
            messages, used = with_rows(ONE, [(status.key, status.grid_thw)], FLEET_FAMILY)
            params = transfer_params([(key, grid, replica) for key, grid in used])
            response = stack.chat(messages, direct=True, ec_transfer_params=params)
            assert response.status_code == 200, response.text
