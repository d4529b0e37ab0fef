"""The chart with TokenSpeed's encode worker: who reaches the ports, and where rows may go."""

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
    of_kind,
    render,
    settings_of,
    validate,
    workload_of,
)

ON: Object = {"tokenspeed": {"enabled": True}}
PORTS = {32000, 8998, 8999}
PEER = {"vision-encoder/tokenspeed": "true"}
TENANT = {"kubernetes.io/metadata.name": "tenant"}


def test_the_service_listens_on_the_pods_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chart.FROM_ELSEWHERE, "POD_IP", "10.1.2.3")
    objects = render(ON, {"settings": {"VE_TOKENSPEED_RDMA": "auto"}})
    validate(objects)
    settings = settings_of(objects, monkeypatch)
    assert settings.serve_tokenspeed == "10.1.2.3:32000"
    assert settings.tokenspeed_bootstrap_port == 8998
    assert {port["containerPort"] for port in container_of(objects)["ports"]} >= PORTS


def test_p46_without_the_switch_there_are_no_ports() -> None:
    objects = render()
    assert "VE_SERVE_TOKENSPEED" not in environment_of(objects)
    for port in PORTS:
        assert not is_let_in(objects, labels_of(workload_of(objects, NAME)), port, PEER, TENANT)


def test_p46_only_gateways_and_prefill_workers_reach_the_ports_and_receive_rows() -> None:
    objects = render(ON)
    encoder = labels_of(workload_of(objects, NAME))
    for port in PORTS:
        for peer in ({"vision-encoder/client": "true"}, {"vision-encoder/sglang": "true"}, {}):
            assert not is_let_in(objects, encoder, port, peer, TENANT)
        assert is_let_in(objects, encoder, port, PEER, TENANT)
        assert not is_let_in(objects, encoder, port, PEER, {})
    assert not is_let_in(objects, encoder, 50051, PEER, TENANT)
    (policy,) = of_kind(objects, "NetworkPolicy")
    _, rows = policy["spec"]["egress"]
    assert "ports" not in rows
    assert [each["podSelector"]["matchLabels"] for each in rows["to"]] == [PEER, PEER]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"VE_SERVE_TOKENSPEED": "0.0.0.0:32000"}}, "tokenspeed.enabled makes it"),
        ({**ON, "settings": {"VE_TOKENSPEED_BOOTSTRAP_PORT": "1"}}, "tokenspeed.enabled needs"),
        ({**ON, "networkPolicy": {"enabled": False}}, "needs networkPolicy.enabled"),
        ({"tokenspeed": {"enabled": True, "clients": []}}, "clients"),
    ],
)
def test_contradictions_are_refused(values: Object, message: str) -> None:
    with pytest.raises(RenderingFailed, match=message):
        render(values)
