"""The chart with other systems' protocols: who reaches the ports, and where rows may go."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Protocol:
    name: str
    variable: str
    ports: frozenset[int]

    @property
    def on(self) -> Object:
        return {self.name: {"enabled": True}}

    @property
    def peer(self) -> Object:
        return {f"vision-encoder/{self.name}": "true"}


SGLANG = Protocol("sglang", "VE_SERVE_SGLANG", frozenset({31000}))
TOKENSPEED = Protocol("tokenspeed", "VE_SERVE_TOKENSPEED", frozenset({32000, 8998, 8999}))
TENANT = {"kubernetes.io/metadata.name": "tenant"}
both = pytest.mark.parametrize("protocol", [SGLANG, TOKENSPEED], ids=lambda protocol: protocol.name)


def test_the_service_takes_sglangs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chart.FROM_ELSEWHERE, "POD_IP", "10.1.2.3")
    objects = render(SGLANG.on, {"settings": {"VE_SGLANG_REGISTER": "http://sglang:8997"}})
    validate(objects)
    settings = settings_of(objects, monkeypatch)
    assert settings.serve_sglang == "0.0.0.0:31000"
    assert settings.sglang_url == "http://10.1.2.3:31000"
    assert settings.sglang_register == ("http://sglang:8997",)
    assert 31000 in {port["port"] for port in named(objects, "Service")["spec"]["ports"]}


def test_the_service_takes_tokenspeeds_settings_and_listens_on_the_pods_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(chart.FROM_ELSEWHERE, "POD_IP", "10.1.2.3")
    objects = render(TOKENSPEED.on, {"settings": {"VE_TOKENSPEED_RDMA": "auto"}})
    validate(objects)
    settings = settings_of(objects, monkeypatch)
    assert settings.serve_tokenspeed == "10.1.2.3:32000"
    assert settings.tokenspeed_bootstrap_port == 8998


@pytest.mark.parametrize("values", [{}, {"gateway": {"enabled": True}}], ids=["alone", "gateway"])
def test_p46_http_is_for_the_clients_of_the_service(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    on: Object = {"http": {"enabled": True}}
    objects, without = render(values, on), render(values)
    validate(objects)
    assert settings_of(objects, monkeypatch).http_listen == "0.0.0.0:8000"
    assert "VE_HTTP_LISTEN" not in environment_of(without)
    assert 8000 in {port["port"] for port in named(objects, "Service")["spec"]["ports"]}
    client, encoder = {"vision-encoder/client": "true"}, labels_of(workload_of(objects, NAME))
    assert is_let_in(objects, encoder, 8000, client, TENANT)
    assert not is_let_in(without, encoder, 8000, client, TENANT)
    assert not is_let_in(objects, encoder, 8000, {"vision-encoder/reader": "true"}, TENANT)


@both
def test_p46_only_the_protocols_peers_reach_its_ports_and_receive_rows(protocol: Protocol) -> None:
    objects, without = render(protocol.on), render()
    encoder = labels_of(workload_of(objects, NAME))
    assert protocol.variable not in environment_of(without)
    assert {port["containerPort"] for port in container_of(objects)["ports"]} >= protocol.ports
    others = [{f"vision-encoder/{name}": "true"} for name in ("client", "reader")]
    for port in protocol.ports:
        assert is_let_in(objects, encoder, port, protocol.peer, TENANT)
        assert not is_let_in(objects, encoder, port, protocol.peer, {})
        assert not is_let_in(without, labels_of(workload_of(without)), port, protocol.peer, TENANT)
        for peer in (*others, {}, {"vision-encoder/other": "true"}):
            assert not is_let_in(objects, encoder, port, peer, TENANT)
    assert not is_let_in(objects, encoder, 50051, protocol.peer, TENANT)
    (policy,) = of_kind(objects, "NetworkPolicy")
    _, rows = policy["spec"]["egress"]
    assert "ports" not in rows
    assert [each["podSelector"]["matchLabels"] for each in rows["to"]] == [protocol.peer] * 2


@both
def test_p46_ports_without_a_list_of_peers_are_refused(protocol: Protocol) -> None:
    with pytest.raises(RenderingFailed, match="clients"):
        render({protocol.name: {"enabled": True, "clients": []}})
    with pytest.raises(RenderingFailed, match=r"needs networkPolicy\.enabled"):
        render(protocol.on, {"networkPolicy": {"enabled": False}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"VE_HTTP_LISTEN": "0.0.0.0:8000"}}, "http.enabled sets it"),
        ({"settings": {"VE_SERVE_SGLANG": "0.0.0.0:31000"}}, "sglang.enabled sets it"),
        ({**SGLANG.on, "settings": {"VE_SERVE_SGLANG": "0.0.0.0:1"}}, "sglang.enabled needs"),
        ({**SGLANG.on, "settings": {"VE_SGLANG_URL": "http://a:1"}}, "from the pod's address"),
        ({"settings": {"VE_SERVE_TOKENSPEED": "0.0.0.0:32000"}}, "tokenspeed.enabled makes it"),
        ({**TOKENSPEED.on, "settings": {"VE_TOKENSPEED_BOOTSTRAP_PORT": "1"}}, "tokenspeed.enabled needs"),
    ],
)
def test_settings_that_the_switches_make_are_refused(values: Object, message: str) -> None:
    with pytest.raises(RenderingFailed, match=message):
        render(values)
