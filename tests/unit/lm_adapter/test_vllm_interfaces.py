"""Which versions of vLLM the plugin takes. What it uses of the real one is compared in ``tests/engines``."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lm_adapter.engines.vllm import models
from lm_adapter.engines.vllm.interfaces import INTERFACES
from lm_adapter.errors import InvalidRequest

NEWER = "0.34.1"
MODULE = "vllm.stand_in"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of vLLM with a function that the plugin calls, and one that it replaces."""
    module: Any = ModuleType(MODULE)
    module.called, module.replaced = lambda a, b: None, lambda a: None
    package: Any = ModuleType("vllm")
    package.__version__, package.ModelRegistry = NEWER, None
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, MODULE, module)
    of_module = dataclasses.replace(
        INTERFACES, called={MODULE: ("called(a, b)",)}, overridden={MODULE: ("replaced(a)",)}
    )
    monkeypatch.setattr(models, "INTERFACES", of_module)
    module.interfaces = of_module
    return module


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.2.post1", "0.32.1+cpu"])
def test_tested_versions_are_taken_as_they_are(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without vLLM's modules: nothing is imported for a comparison."""
    assert INTERFACES.refusal(version) == ""
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.100.0.dev3+g12345", "dev"])
def test_a_newer_version_with_the_same_interfaces_is_taken_with_a_warning(
    version: str, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A function with further parameters can still be called."""
    vllm.called = lambda a, b, more: None
    assert vllm.interfaces.refusal(version) == ""
    assert vllm.interfaces.refusal(version) == ""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"vLLM is {version}, this plugin was tested with 0.32 and 0.33" in record.getMessage()


def test_an_older_version_is_refused(vllm: Any) -> None:
    for version in ("0.31.2", "0.9.1"):
        assert vllm.interfaces.refusal(version) == (
            f"vLLM is {version}, this plugin was tested with 0.32 and 0.33: install one of these"
        )


def hidden(name: str) -> None:
    modules: dict[str, Any] = sys.modules
    modules[name] = None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda module: delattr(module, "called"), f"its {MODULE} has no called"),
        (lambda _: hidden(MODULE), f"its module {MODULE} cannot be imported"),
        (
            lambda module: setattr(module, "replaced", lambda a, more: None),
            f"{MODULE}.replaced takes (a, more), where it was (a)",
        ),
        (
            lambda module: setattr(module, "called", lambda a: None),
            f"{MODULE}.called takes (a), where it was (a, b)",
        ),
    ],
)
def test_a_newer_version_that_differs_is_refused(
    change: Callable[[Any], None], text: str, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin registers nothing, so that a vLLM without the connector runs; the connector says why."""
    change(vllm)
    models.register()
    with pytest.raises(InvalidRequest, match="newer release of this plugin") as refused:
        models.check_model(SimpleNamespace(model_config=SimpleNamespace(architecture="any")))  # type: ignore[arg-type]
    assert text in refused.value.message
    assert "tested with 0.32 and 0.33" in refused.value.message
    (record,) = caplog.records
    assert text in record.getMessage()
