"""Values and names that a chart meets sooner or later: what it renders of them an API server takes."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from encoder_service.config import parse_settings
from tests.deploy import custom_resources
from tests.deploy.go_template import TemplateError
from tests.deploy.rendering import NAME, Object, named, of_kind, pod_of
from tests.deploy.test_chart import render

SUMS = f"{64 * 'a'}  config.json\n"
EVERYTHING: Object = {
    "monitoring": {"enabled": True},
    "broker": {"enabled": True},
    "tls": {"enabled": True},
    "tokens": {"enabled": True},
    "valkey": {"enabled": True},
    "weights": {"source": "fetch", "fetch": {"baseUrl": "https://w.example.com/c", "sums": SUMS}},
}


def valid(objects: list[Object]) -> list[Object]:
    for found in objects:
        if found["kind"] in custom_resources.KINDS:
            custom_resources.validate(found)
        else:
            kubernetes_validate.validate(found, "1.33", strict=True)
    return objects


def encoder_of(objects: list[Object], name: str = NAME) -> Object:
    (found,) = pod_of(named(objects, "Deployment", name))["containers"]
    container: Object = found
    return container


@pytest.mark.parametrize("kind", ["hpa", "keda"])
@pytest.mark.parametrize("release", ["encoders", "123", "true", "1e3", "with.dots"])
def test_a_releases_name_is_a_text_in_every_label(release: str, kind: str) -> None:
    objects = valid(
        render(EVERYTHING, {"fullnameOverride": "enc", "autoscaling": {"kind": kind}}, release=release)
    )
    labels = [each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects]
    assert set(labels) == {release}


def test_a_release_with_dots_has_services_with_names_that_services_may_have() -> None:
    objects = valid(render(EVERYTHING, release="a.b"))
    assert {each["metadata"]["name"] for each in of_kind(objects, "Service")} == {
        "a-b", "a-b-local", "a-b-valkey"
    }  # fmt: skip


def test_two_releases_of_one_namespace_share_no_object_and_no_secret() -> None:
    one, other = (render(EVERYTHING, release=release) for release in ("one", "other"))
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, other)]
    assert not names[0] & names[1]

    def secrets(objects: list[Object]) -> set[str]:
        pod = pod_of(named(objects, "Deployment", objects_name(objects)))
        found = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        for container in (*pod["initContainers"], *pod["containers"]):
            for entry in container.get("env", ()):
                source = entry.get("valueFrom", {}).get("secretKeyRef")
                found |= {source["name"]} if source else set()
        return found

    def objects_name(objects: list[Object]) -> str:
        return str(of_kind(objects, "ServiceAccount")[0]["metadata"]["name"])

    assert secrets(one) == {"one-tls", "one-tokens", "one-valkey", "one-weights"}
    assert not secrets(one) & secrets(other)


def test_affinity_of_ones_own_and_the_brokers_are_both_there() -> None:
    own = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pod = {"affinity": own, "runtimeClassName": "nvidia"}
    alone = pod_of(named(valid(render({"pod": pod})), "Deployment"))
    assert (alone["affinity"], alone["runtimeClassName"]) == (own, "nvidia")
    both = pod_of(named(valid(render({"pod": pod, "broker": {"enabled": True}})), "Deployment"))
    assert both["affinity"].keys() == {"nodeAffinity", "podAffinity"}
    assert "affinity" not in pod_of(named(render(), "Deployment"))


@pytest.mark.parametrize("tokens", [True, False])
def test_variables_that_are_no_settings_reach_the_process(tokens: bool) -> None:
    given = [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.traces:4317"}]
    objects = valid(render({"env": given, "tokens": {"enabled": tokens}}))
    env = encoder_of(objects)["env"]
    assert env[-1] == given[0]
    assert len(env) == 1 + tokens
    assert "env" not in encoder_of(render())


def test_labels_and_annotations_of_ones_own() -> None:
    objects = valid(render({
        "podLabels": {"team": "vision"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    }))  # fmt: skip
    metadata = named(objects, "Deployment")["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "vision"
    assert metadata["annotations"].keys() == {"checksum/config", "sidecar.istio.io/inject"}
    # Which the stack's Prometheus selects by, and by nothing else.
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert named(objects, kind)["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("https://w.example.com/c", 443),
        ("http://w.example.com/c", 80),
        ("http://weights.models.svc:8080/c", 8080),
        ("https://10.0.0.1:8443", 8443),
    ],
)
def test_the_weights_port_is_let_out(url: str, port: int) -> None:
    objects = valid(render({"weights": {"source": "fetch", "fetch": {"baseUrl": url, "sums": SUMS}}}))
    *_, rule = named(objects, "NetworkPolicy")["spec"]["egress"]
    assert rule == {"ports": [{"port": port, "protocol": "TCP"}]}


def test_changed_weights_and_secrets_roll_the_pods() -> None:
    def annotations(**more: Any) -> Object:
        given = {"tokens": {"enabled": True, "file": "a=1\n", "admin": "9"}} | more
        found: Object = named(render(EVERYTHING, given), "Deployment")["spec"]["template"]["metadata"]
        return dict(found["annotations"])

    before = annotations()
    other_sums = {"source": "fetch", "fetch": {"baseUrl": "https://w", "sums": SUMS.replace("a", "b")}}
    other_admin = {"enabled": True, "file": "a=1\n", "admin": "8"}
    # The tokens' file is followed without a restart; the admin token is in the environment.
    other_file = {"enabled": True, "file": "a=2\n", "admin": "9"}
    assert annotations(weights=other_sums) != before
    assert annotations(tokens=other_admin) != before
    assert annotations(tokens=other_file) == before


def test_settings_come_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"VE_MODEL_NAME": "yes", "VE_NAMESPACE_SHARES": 'a=1,"b"=2', "VE_SHARED_PREFIX": "1e6"}
    data = named(valid(render({"settings": given})), "ConfigMap", f"{NAME}-config")["data"]
    assert given.items() <= data.items()
    for name, value in data.items():
        monkeypatch.setenv(name, value)
    assert parse_settings().model_name == "yes"


@pytest.mark.parametrize(
    "given", [{"preStopSeconds": 11}, {"settings": {"VE_DRAIN_GRACE_S": "30.5"}}], ids=["preStop", "drain"]
)
def test_p37_a_grace_period_that_cuts_the_drain_is_refused(given: Object) -> None:
    with pytest.raises(TemplateError, match="terminationGracePeriodSeconds is below"):
        render(given)
    valid(render(given, {"terminationGracePeriodSeconds": 60}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls": {"enabled": True, "key": "K"}}, r"tls\.certificate is not"),
        ({"tls": {"enabled": True, "certificate": "C"}}, r"tls\.key is not"),
        ({"tokens": {"enabled": True, "file": "a=b"}}, r"tokens\.admin is not"),
        ({"valkey": {"enabled": True, "url": "redis://h", "password": "p"}}, "sharedSecret is missing"),
    ],
    ids=["key", "certificate", "tokens", "valkey"],
)
def test_half_a_secret_is_refused(given: Object, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(given)
