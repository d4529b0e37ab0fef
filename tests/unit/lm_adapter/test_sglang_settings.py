"""The plugin's variable, and SGLang's variables that load it."""

from __future__ import annotations

import json

import pytest

from lm_adapter.engines.sglang.settings import LOADERS, PACKAGE, VARIABLE, Settings, check_loaded
from lm_adapter.errors import InvalidRequest

BOTH = dict.fromkeys(LOADERS, PACKAGE)


def test_an_object_gives_the_settings() -> None:
    config = {"target": "10.0.0.1:50051", "timeout_s": 4, "transports": ["host", "inline"], "finite": True}
    settings = Settings.of_variable({VARIABLE: json.dumps(config)})
    assert settings.target == "10.0.0.1:50051"
    assert settings.timeout_s == 4
    assert settings.transports == ("host", "inline")
    assert settings.finite


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not set"),
        ("", "is not set"),
        ("{", "no JSON"),
        ('["10.0.0.1:50051"]', "holds a list"),
        ("{}", "has no target"),
        ('{"target": "a:1", "max_resident_bytes": 1}', "max_resident_bytes"),
        ('{"target": "a:1", "token_file": "/nonexistent"}', "/nonexistent"),
    ],
)
def test_an_invalid_variable_is_refused(text: str | None, words: str) -> None:
    environment = {} if text is None else {VARIABLE: text}
    with pytest.raises(InvalidRequest, match=words) as refused:
        Settings.of_variable(environment)
    assert "ec_connector" not in refused.value.message


def test_both_halves_are_loaded_or_none() -> None:
    check_loaded(BOTH)
    for name in LOADERS:
        for package in ("", "another.package"):
            with pytest.raises(InvalidRequest, match=name):
                check_loaded(BOTH | {name: package})


def test_an_encoder_starts_in_the_same_environment() -> None:
    """It refuses variables of its own prefix that it does not know."""
    from encoder_service.config import ENV_PREFIX

    assert not VARIABLE.startswith(ENV_PREFIX)
