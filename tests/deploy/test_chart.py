"""The chart says what the kustomizations say, refuses values that mean nothing, makes Secrets when asked."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

import encoder_service
from encoder_service.ops.tokens import NamespaceTokens
from tests.deploy import custom_resources, kustomize
from tests.deploy.go_template import Chart, TemplateError
from tests.deploy.rendering import BUILDS, CHART, K8S, NAME, OVERLAYS, Object, built, charted, named, pod_of
from tests.deploy.test_renderers import in_order

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# What the chart adds: which release an object is of, and by which chart.
RELEASE_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")


def plain(node: Any) -> Any:
    """Without what is the tool's own: the release's labels, and the checksum that rolls pods."""
    if isinstance(node, dict):
        found = {name: plain(value) for name, value in node.items() if name not in RELEASE_LABELS}
        if "annotations" in found and found["annotations"].keys() == {"checksum/config"}:
            del found["annotations"]
        return found
    if isinstance(node, list):
        return [plain(part) for part in node]
    return node


def content(objects: Any) -> dict[tuple[str, str], Object]:
    found = {}
    for each in objects:
        if each["kind"] == "Namespace":
            continue
        each = plain(each)
        metadata = each["metadata"]
        metadata.pop("namespace", None)
        if each["kind"] == "ConfigMap" and not metadata["name"].endswith("-dashboard"):
            # Which has no labels there, and a hash in its name.
            metadata.pop("labels", None)
            metadata["name"] = "-".join(metadata["name"].split("-")[:3])
        found[each["kind"], metadata["name"]] = in_order(each)
    deployment = found["Deployment", NAME]
    for container in (*pod_of(deployment).get("initContainers", ()), *pod_of(deployment)["containers"]):
        for source in container.get("envFrom", ()):
            source["configMapRef"]["name"] = f"{NAME}-config"
    return found


@pytest.mark.parametrize("build", BUILDS)
def test_chart_and_kustomization_have_the_same_content(build: str) -> None:
    ours, theirs = content(charted(build)), content(built(build))
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert ours[key] == expected, key


def test_every_overlay_has_its_values_and_they_are_valid() -> None:
    files = {path.name for path in CHART.glob("values-*.yaml")}
    assert files == {f"values-{overlay}.yaml" for overlay in OVERLAYS}
    chart = Chart(CHART)
    for name in files:
        jsonschema.validate(chart.values(yaml.safe_load((CHART / name).read_text())), SCHEMA)
    jsonschema.validate(chart.values(), SCHEMA)


def test_the_schema_knows_every_value() -> None:
    def compare(values: Object, schema: Object, path: str) -> None:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if schema.get("additionalProperties") is False:
            known = schema["properties"].keys() - {"global"}
            assert values.keys() == known, f"{path}: {values.keys() ^ known}"
            for name, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema["properties"][name], f"{path}.{name}")

    compare(Chart(CHART).values(), SCHEMA, "values")


@pytest.mark.parametrize(
    "values",
    [
        {"setings": {}},
        {"settings": {"VE_STORE_BYTES": 1073741824}},
        {"settings": {"STORE_BYTES": "1"}},
        {"autoscaling": {"kind": "vpa"}},
        {"weights": {"source": "hub"}},
        {"broker": {"enabled": True, "folder": "/" + 60 * "x"}},
        {"resources": {"limits": {"memory": "8 GiB"}}},
        # Of which the chart has its own: two of a name are no YAML.
        {"pod": {"terminationGracePeriodSeconds": 50}},
        {"pod": {"volumes": []}},
        {"pod": {"hostIPC": True}},
        # 1e+06m
        {"autoscaling": {"targets": {"queueSeconds": 1_000_000}}},
        {"env": {"OTEL_SDK_DISABLED": "true"}},
    ],
)
def test_values_that_mean_nothing_are_refused(values: Object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(Chart(CHART).values(values), SCHEMA)


def render(*values: Object, release: str = NAME) -> list[Object]:
    chart = Chart(CHART)
    merged = chart.values(*values)
    jsonschema.validate(merged, SCHEMA)
    return chart.render(merged, release=release, namespace="tenant")


def test_the_chart_has_the_projects_version_and_needs_what_the_manifests_need() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert meta["version"] == meta["appVersion"] == encoder_service.__version__
    assert meta["kubeVersion"] == ">=1.30.0-0"


def test_a_build_of_the_chart_has_a_label_that_labels_may_be() -> None:
    chart = Chart(CHART)
    chart.meta = chart.meta | {"version": "0.1.0+build.7"}
    objects = chart.render(chart.values(), release=NAME, namespace="tenant")
    assert {each["metadata"]["labels"]["helm.sh/chart"] for each in objects} == {
        "vision-encoder-0.1.0_build.7"
    }


# A chart is packed from its own folder alone, and not every checkout has symbolic links.
COPIES = {
    "dashboard.json": K8S.parent / "grafana" / "vision-encoder.json",
    "fetch_weights.py": K8S / "components" / "fetch-weights" / "fetch_weights.py",
    "prometheusrule.yaml": K8S / "components" / "monitoring" / "prometheusrule.yaml",
}


def test_the_charts_copies_are_what_the_kustomizations_have() -> None:
    assert {path.name for path in (CHART / "files").iterdir()} == set(COPIES)
    for name, original in COPIES.items():
        copied = CHART / "files" / name
        assert copied.read_bytes() == original.read_bytes(), f"cp {original} {copied}"


def test_two_releases_do_not_select_each_others_pods() -> None:
    one, other = (named(render(release=release), "Deployment", release) for release in ("one", "other"))
    selector = one["spec"]["selector"]["matchLabels"]
    assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    assert not selector.items() <= other["spec"]["template"]["metadata"]["labels"].items()


def test_a_changed_setting_rolls_the_pods() -> None:
    def checksum(*values: Object) -> str:
        annotations = named(render(*values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum({"settings": {"VE_LOG_LEVEL": "debug"}})


def test_the_alerts_links_lead_where_the_value_says() -> None:
    base = "https://wiki.example.com/runbook"
    objects = render({"monitoring": {"enabled": True, "runbook": base}})
    rules = [rule for group in named(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    assert all(rule["annotations"]["runbook_url"].startswith(base + "#") for rule in rules)


def test_keda_asks_for_the_releases_namespace() -> None:
    objects = render({"autoscaling": {"kind": "keda"}})
    queries = [trigger["metadata"]["query"] for trigger in named(objects, "ScaledObject")["spec"]["triggers"]]
    assert all('{namespace="tenant",service="vision-encoder"}' in query for query in queries)
    objects = render({"autoscaling": {"kind": "keda"}}, release="other")
    for trigger in named(objects, "ScaledObject", "other")["spec"]["triggers"]:
        assert 'service="other"' in trigger["metadata"]["query"]
        # An empty answer is no load of zero: the fallback's number stands then.
        assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_secrets_are_made_when_their_content_is_given(tmp_path: Any) -> None:
    given = {
        "tls": {"enabled": True, "certificate": "-----BEGIN\nA\n", "key": "K\n"},
        "tokens": {"enabled": True, "file": "a=1234\nb=5678\n", "admin": "9"},
        "valkey": {"enabled": True, "url": "redis://:p@h:6379/0", "password": "p", "sharedSecret": "s" * 16},
    }
    secrets = {each["metadata"]["name"]: each for each in render(given) if each["kind"] == "Secret"}
    assert secrets["vision-encoder-tls"]["stringData"] == {"tls.crt": "-----BEGIN\nA\n", "tls.key": "K\n"}
    assert secrets.keys() == {"vision-encoder-tls", "vision-encoder-tokens", "vision-encoder-valkey"}
    (tmp_path / "tokens").write_text(secrets["vision-encoder-tokens"]["stringData"]["tokens"])
    assert NamespaceTokens(file=tmp_path / "tokens").opens("b", "5678")
    assert secrets["vision-encoder-valkey"]["stringData"].keys() == {"url", "password", "secret"}
    assert not [each for each in charted("gpu-secured") if each["kind"] == "Secret"]


def test_weights_are_fetched_alike_by_both(tmp_path: Any) -> None:
    sums = f"{64 * 'a'}  config.json\n"
    (tmp_path / "SHA256SUMS").write_text(sums)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{K8S / 'base'}]\ncomponents: [{K8S / 'components' / 'fetch-weights'}]\n"
        "configMapGenerator:\n"
        "  - {name: vision-encoder-weights, behavior: merge, files: [SHA256SUMS],\n"
        "     literals: ['base-url=https://w.example.com/c']}\n"
    )
    theirs = kustomize.build(tmp_path)
    fetch = {"baseUrl": "https://w.example.com/c", "sums": sums}
    ours = render({"weights": {"source": "fetch", "fetch": fetch}})
    pods = [pod_of(named(objects, "Deployment")) for objects in (ours, theirs)]
    for pod in pods:
        (container,) = pod["initContainers"]
        container["env"][0]["valueFrom"]["configMapKeyRef"]["name"] = "weights"
        for volume in pod["volumes"]:
            volume.get("configMap", {}).pop("name", None)
        del pod["containers"][0]["envFrom"]
    assert plain(in_order(pods[0])) == plain(in_order(pods[1]))
    data = [
        next(each["data"] for each in objects if each["kind"] == "ConfigMap" and "base-url" in each["data"])
        for objects in (ours, theirs)
    ]
    assert {name: text.strip() for name, text in data[0].items()} == {
        name: text.strip() for name, text in data[1].items()
    }
    policies = [plain(named(objects, "NetworkPolicy"))["spec"] for objects in (ours, theirs)]
    assert policies[0] == policies[1]
    for objects in (ours, theirs):
        for each in objects:
            assert each["kind"] not in custom_resources.KINDS


def test_weights_without_a_source_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"weights\.fetch\.baseUrl is empty"):
        render({"weights": {"source": "fetch"}})
