"""Padding under load, as it goes into the tower bench's result."""

from __future__ import annotations

import json

from padding import BACKLOG, LOADS
from padding_load import POWERS, SERVICE, padding_under_load


def test_every_load_has_both_policies_and_the_service_wastes_less() -> None:
    found = padding_under_load(max_patches=16_384, max_items=64, seed=3, num_images=300)
    assert json.loads(json.dumps(found))["records"] == found["records"]
    by_place = {(one["policy"], one["load"]): one["waste_share"] for one in found["records"]}
    loads = [None if load == BACKLOG else load for load in (*LOADS, BACKLOG)]
    assert set(by_place) == {(policy, load) for policy in (SERVICE, POWERS) for load in loads}
    for load in loads:
        assert 0 <= by_place[SERVICE, load] < by_place[POWERS, load] < 1
    assert found["num_sizes"][SERVICE] > found["num_sizes"][POWERS] > 1


def test_the_same_seed_gives_the_same_traffic() -> None:
    first, second, other = (
        padding_under_load(max_patches=8192, max_items=16, seed=seed, num_images=100) for seed in (1, 1, 2)
    )
    assert first == second
    assert first["records"] != other["records"]
