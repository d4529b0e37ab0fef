"""The chart with SGLang's protocol: who reaches the port, and where rows may go."""

from __future__ import annotations

import pytest

from tests.deploy import chart
from tests.deploy.chart import (
    NAME,
    Object,
    RenderingFailed,
    container_of,
    environment_of,
    is_let_in,
    labels_of,
    named,
    of_kind,
    render,
    settings_of,
    validate,
    workload_of,
)

ON: Object = {"sglang": {"enabled": True}}
PORT = 31000
SERVER = {"vision-encoder/sglang": "true"}
TENANT = {"kubernetes.io/metadata.name": "tenant"}


def ports_of(objects: list[Object]) -> set[int]:
    return {port["containerPort"] for port in container_of(objects)["ports"]}


def test_the_service_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chart.FROM_ELSEWHERE, "POD_IP", "10.1.2.3")
    register = {"settings": {"VE_SGLANG_REGISTER": "http://sglang:8997"}}
    objects = render(ON, register)
    validate(objects)
    settings = settings_of(objects, monkeypatch)
    assert settings.serve_sglang == f"0.0.0.0:{PORT}"
    assert settings.sglang_url == f"http://10.1.2.3:{PORT}"
    assert settings.sglang_register == ("http://sglang:8997",)
    assert PORT in ports_of(objects)
    assert PORT in {port["port"] for port in named(objects, "Service")["spec"]["ports"]}


def test_p46_without_the_switch_there_is_no_port() -> None:
    objects = render()
    assert "VE_SERVE_SGLANG" not in environment_of(objects)
    assert PORT not in ports_of(objects)
    assert not is_let_in(objects, labels_of(workload_of(objects, NAME)), PORT, SERVER, TENANT)


def test_p46_only_sglangs_servers_reach_the_port_and_receive_rows() -> None:
    objects = render(ON)
    encoder = labels_of(workload_of(objects, NAME))
    for peer in ({"vision-encoder/client": "true"}, {"vision-encoder/reader": "true"}, {}):
        assert not is_let_in(objects, encoder, PORT, peer, TENANT)
    assert is_let_in(objects, encoder, PORT, SERVER, TENANT)
    assert not is_let_in(objects, encoder, PORT, SERVER, {})
    assert not is_let_in(objects, encoder, 50051, SERVER, TENANT)
    (policy,) = of_kind(objects, "NetworkPolicy")
    names, rows = policy["spec"]["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    assert "ports" not in rows
    assert [each["podSelector"]["matchLabels"] for each in rows["to"]] == [SERVER, SERVER]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"VE_SERVE_SGLANG": "0.0.0.0:31000"}}, "sglang.enabled sets it"),
        ({**ON, "settings": {"VE_SERVE_SGLANG": "0.0.0.0:1"}}, "sglang.enabled needs"),
        ({**ON, "settings": {"VE_SGLANG_URL": "http://a:1"}}, "from the pod's address"),
        ({"sglang": {"enabled": True, "clients": []}}, "clients"),
        ({**ON, "networkPolicy": {"enabled": False}}, "sglang.enabled needs networkPolicy.enabled"),
    ],
)
def test_contradictions_are_refused(values: Object, message: str) -> None:
    with pytest.raises(RenderingFailed, match=message):
        render(values)
