"""The order of a run on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.order import SECONDS_FILE, UNKNOWN_S, dealt, known_seconds, unit_name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest starts first, and a costly fixture's tests stay with one worker."""
    known = known_seconds(SECONDS_FILE.read_text().splitlines())

    def seconds_of(item: pytest.Item) -> float:
        return known.get(item.nodeid, UNKNOWN_S)

    def unit_of(item: pytest.Item) -> object:
        return unit_name(str(item.path), item.nodeid, shared_parameters(item), seconds_of(item))

    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealt(items, num_workers, unit_of, seconds_of)


def shared_parameters(item: pytest.Item) -> dict[str, object] | None:
    """Of the fixtures that are set up once for tests of a module, but for those that all of its tests have;
    None where the test asks for none."""
    found = {
        name
        for name, definitions in getattr(item, "_fixtureinfo").name2fixturedefs.items()  # noqa: B009
        if definitions and definitions[-1].scope == "module"
        if not getattr(definitions[-1], "_autouse", False)
    }
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: parameters[name] for name in found & set(parameters)} if found else None
