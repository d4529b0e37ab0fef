"""Settings that the chart makes too: one's own count, and what cannot go with a switch is refused by name."""

from __future__ import annotations

import pytest

from tests.deploy.go_template import Chart, TemplateError
from tests.deploy.rendering import CHART, NAME, Object, config_of
from tests.deploy.test_chart import render


def settings(given: dict[str, str], *switches: str) -> dict[str, str]:
    """Of the ConfigMap, by the chart with these settings and switches."""
    values: Object = {"settings": given, **{name: {"enabled": True} for name in switches}}
    return config_of(render(values))


@pytest.mark.parametrize(
    ("switch", "name", "usual", "own"),
    [
        ("tls", "VE_CONNECTION_AGE_S", "3600", "600"),
        ("valkey", "VE_SHARED_TTL_S", "86400", "3600"),
        ("valkey", "VE_SHARED_PREFIX", "ve", "team-a"),
        ("broker", "VE_ARENA_BYTES", "4294967296", "8589934592"),
    ],
)
def test_a_setting_of_ones_own_counts(switch: str, name: str, usual: str, own: str) -> None:
    assert settings({}, switch)[name] == usual
    assert settings({name: own}, switch)[name] == own
    assert settings({name: own})[name] == own
    assert name not in settings({})


@pytest.mark.parametrize(
    ("switch", "name", "needed", "own"),
    [
        ("tokens", "VE_OPEN_NAMESPACES", "false", "true"),
        ("tokens", "VE_OPEN_NAMESPACES", "false", "1"),
        ("tokens", "VE_TOKENS_FILE", "/etc/vision-encoder/tokens/tokens", "/models/tokens"),
        ("tls", "VE_TLS_CERT", "/etc/vision-encoder/tls/tls.crt", "/models/tls.crt"),
        ("tls", "VE_TLS_KEY", "/etc/vision-encoder/tls/tls.key", ""),
    ],
)
def test_what_would_undo_a_switch_is_refused(switch: str, name: str, needed: str, own: str) -> None:
    with pytest.raises(TemplateError, match=f'settings.{name} is "{own}", {switch}.enabled needs "{needed}"'):
        settings({name: own}, switch)
    assert settings({name: needed}, switch)[name] == needed
    assert settings({}, switch)[name] == needed
    assert settings({name: own})[name] == own


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("tokens", "VE_ADMIN_TOKEN"),
        ("broker", "VE_BROKER_PATH"),
        ("valkey", "VE_SHARED_URL"),
        ("valkey", "VE_SHARED_SECRET"),
    ],
)
def test_what_a_pod_has_from_elsewhere_is_refused_beside_it(switch: str, name: str) -> None:
    """The pod's own variable would count, and not this one."""
    with pytest.raises(TemplateError, match=rf"settings\.{name} is given, {switch}\.enabled brings its own"):
        settings({name: "mine"}, switch)
    assert settings({name: "mine"})[name] == "mine"


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:50051",
        "[::]:50051",
        "unix:/run/vision-encoder/encoder.sock, 0.0.0.0:50051",
        "0.0.0.0:6000,[::]:50051",
    ],
)
def test_the_server_listens_where_probes_look(listen: str) -> None:
    assert settings({"VE_LISTEN": listen})["VE_LISTEN"] == listen


@pytest.mark.parametrize(
    "listen",
    [
        "0.0.0.0:6000",
        "127.0.0.1:50051",
        "unix:/run/a:50051",
        "0.0.0.0:150051",
        "0.0.0.0:500510",
        "",
        "10.0.0.0.0:50051",
    ],
)
def test_a_server_that_listens_elsewhere_is_refused(listen: str) -> None:
    with pytest.raises(TemplateError, match=f'settings.VE_LISTEN is "{listen}", .* 0.0.0.0:50051 in it'):
        settings({"VE_LISTEN": listen})


@pytest.mark.parametrize("listen", ["0.0.0.0:9000", "127.0.0.1:8080", "0.0.0.0:80801"])
def test_an_admin_plane_that_listens_elsewhere_is_refused(listen: str) -> None:
    with pytest.raises(TemplateError, match=rf'settings\.VE_ADMIN_LISTEN is "{listen}".*0\.0\.0\.0:8080'):
        settings({"VE_ADMIN_LISTEN": listen})


def test_a_pod_may_be_without_an_admin_plane_unless_something_asks_it() -> None:
    off: Object = {"settings": {"VE_ADMIN_LISTEN": ""}}
    assert config_of(render(off))["VE_ADMIN_LISTEN"] == ""
    for switch in ("tls", "monitoring"):
        with pytest.raises(TemplateError, match=rf'settings\.VE_ADMIN_LISTEN is "", {switch}\.enabled needs'):
            render(off, {switch: {"enabled": True}})


def test_a_setting_that_is_taken_away_is_the_services_own() -> None:
    """null removes a name of values.yaml."""
    chart = Chart(CHART)
    for name, said in (("VE_LISTEN", r"127\.0\.0\.1:50051"), ("VE_ADMIN_LISTEN", r"127\.0\.0\.1:8080")):
        values = chart.values()
        del values["settings"][name]
        with pytest.raises(TemplateError, match=f'settings.{name} is "{said}"'):
            chart.render(values, release=NAME, namespace="tenant")
