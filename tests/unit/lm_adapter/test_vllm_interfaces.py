"""Which versions of vLLM the plugin takes, in a made-up tree of vLLM's modules."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lm_adapter.engines.vllm import interfaces, models
from lm_adapter.engines.vllm.interfaces import CALLED, OVERRIDDEN, refusal
from lm_adapter.errors import InvalidRequest

NEWER = "0.34.1"


def callable_with(parameters: str) -> Callable[..., None]:
    """Takes these, after ``self``."""

    def stand_in() -> None: ...

    names = ["self", *(name for name in parameters.split(", ") if name)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stand_in.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    return stand_in


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """All that the tables name."""
    for table in (CALLED, OVERRIDDEN):
        for name, entries in table.items():
            if name not in sys.modules or not isinstance(sys.modules[name], ModuleType):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            for entry in entries:
                path, _, parameters = entry.rstrip(")").partition("(")
                *owners, last = path.split(".")
                owner: Any = sys.modules[name]
                for part in owners:
                    if not hasattr(owner, part):
                        setattr(owner, part, type(part, (), {}))
                    owner = getattr(owner, part)
                if last not in vars(owner):
                    setattr(owner, last, type(last, (), {}))
                vars(owner)[last].__signature__ = inspect.signature(callable_with(parameters))
    refusal.cache_clear()
    yield sys.modules["vllm"]
    refusal.cache_clear()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.2.post1", "0.32.1+cpu"])
def test_tested_versions_are_taken_as_they_are(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without vLLM's modules: nothing is imported for a comparison."""
    assert refusal(version) == ""
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.100.0.dev3+g12345", "dev"])
def test_a_newer_version_with_the_same_interfaces_is_taken_with_a_warning(
    version: str, vllm: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(version) == ""
    assert refusal(version) == ""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"vLLM is {version}, this plugin was tested with 0.32 and 0.33" in record.getMessage()


def test_an_older_version_is_refused(vllm: ModuleType) -> None:
    for version in ("0.31.2", "0.9.1"):
        assert refusal(version) == (
            f"vLLM is {version}, this plugin was tested with 0.32 and 0.33: install one of these"
        )


def remove(vllm: ModuleType) -> None:
    del sys.modules["vllm.multimodal.media"].MediaConnector.load_from_url_async  # type: ignore[attr-defined]


def remove_module(vllm: ModuleType) -> None:
    sys.modules["vllm.v1.core.encoder_cache_manager"] = None  # type: ignore[assignment]


def give_more(vllm: ModuleType) -> None:
    serving: Any = sys.modules["vllm.entrypoints.generate.base.serving"]
    serving.GenerateBaseServing._raise_if_error = callable_with("finish_reason, request_id, error")


def take_less(vllm: ModuleType) -> None:
    manager: Any = sys.modules["vllm.multimodal.inputs"]
    manager.MultiModalFieldConfig.batched = callable_with("modality")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove, "its vllm.multimodal.media has no MediaConnector.load_from_url_async"),
        (remove_module, "its module vllm.v1.core.encoder_cache_manager cannot be imported"),
        (
            give_more,
            "vllm.entrypoints.generate.base.serving.GenerateBaseServing._raise_if_error takes "
            "(finish_reason, request_id, error), where it was (finish_reason, request_id)",
        ),
        (take_less, "MultiModalFieldConfig.batched takes (modality), where it was (modality, keep_on_cpu)"),
    ],
)
def test_a_newer_version_that_differs_is_refused(
    change: Callable[[ModuleType], None],
    text: str,
    vllm: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The plugin registers nothing, so that a vLLM without the connector runs; the connector says why."""
    vllm.__version__ = NEWER  # type: ignore[attr-defined]
    change(vllm)
    models.register()
    with pytest.raises(InvalidRequest, match="newer release of this plugin") as refused:
        models.check_model(SimpleNamespace(model_config=SimpleNamespace(architecture="any")))  # type: ignore[arg-type]
    assert text in refused.value.message
    assert "tested with 0.32 and 0.33" in refused.value.message
    (record,) = caplog.records
    assert text in record.getMessage()


def test_a_method_with_further_parameters_can_still_be_called(vllm: ModuleType) -> None:
    fields: Any = sys.modules["vllm.multimodal.inputs"]
    fields.MultiModalFieldConfig.batched = callable_with("modality, keep_on_cpu, more")
    assert interfaces.first_difference() == ""
