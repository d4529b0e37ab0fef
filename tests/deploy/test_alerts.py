"""Alerts and autoscalers: of metrics that exist, tested by promtool where it is, each with its runbook."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.metric_table import full_registry, names_with_series, rows_of
from tests.deploy.rendering import (
    GPU_BUILDS,
    K8S,
    NAME,
    Object,
    built,
    charted,
    named,
    of_kind,
    quantity,
    settings_of,
)

ROWS = rows_of(full_registry())
KNOWN = names_with_series(ROWS)
RULE = yaml.safe_load((K8S / "components" / "monitoring" / "prometheusrule.yaml").read_text())
RULES = [rule for group in RULE["spec"]["groups"] for rule in group["rules"]]
SCENES = Path(__file__).with_name("alerts.promtool.yaml")
DOCUMENT = (K8S.parents[1] / "docs" / "deploy.md").read_text()
# Those that Prometheus and the operator put on every series.
TARGET_LABELS = {"namespace", "pod", "job", "instance", "service", "container", "endpoint"}


def strangers(expression: str) -> list[str]:
    """Metrics of an expression that do not exist, and labels that they do not have."""
    found = []
    names = re.findall(r"\b(ve_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?", expression)
    own = {label for name, _ in names if name != "up" for label in KNOWN.get(name, ())}
    for name, selector in names:
        if name != "up" and name not in KNOWN:
            found.append(name)
            continue
        labels = {*KNOWN.get(name, ()), *TARGET_LABELS}
        used = re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector)
        found += [f"{name}{{{label}}}" for label in used if label not in labels]
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        found += [label for label in re.split(r",\s*", labels) if label not in own | TARGET_LABELS]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_is_of_metrics_and_labels_that_exist(rule: Object) -> None:
    assert strangers(rule["expr"]) == []
    spoken = " ".join(rule["annotations"].values())
    own = {label for name in re.findall(r"\bve_[a-z0-9_]+", rule["expr"]) for label in KNOWN[name]}
    assert set(re.findall(r"\$labels\.(\w+)", spoken)) <= own | TARGET_LABELS


def test_a_metric_or_label_that_does_not_exist_is_noticed() -> None:
    expression = 'sum by (namespace, le, colour) (rate(ve_no_such_total[5m])) + ve_items_total{teir="x"}'
    assert strangers(expression) == ["ve_no_such_total", "ve_items_total{teir}", "le", "colour"]


def test_the_job_that_alerts_name_is_the_one_that_the_monitor_gives() -> None:
    jobs = {job for rule in RULES for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    monitor = named(built("gpu"), "ServiceMonitor")["spec"]
    service = named(built("gpu"), "Service")
    assert jobs == {service["metadata"]["labels"][monitor["jobLabel"]]}
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    # The reader's service leads to the same pods, which would be scraped twice.
    local = named(built("gpu-shared-node"), "Service", "vision-encoder-local")
    assert not monitor["selector"]["matchLabels"].items() <= local["metadata"]["labels"].items()


def test_metrics_with_a_token_are_scraped_with_it() -> None:
    for objects in (built("gpu-secured"), charted("gpu-secured")):
        (endpoint,) = named(objects, "ServiceMonitor")["spec"]["endpoints"]
        (container,) = named(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        (token,) = (entry for entry in container["env"] if entry["name"] == "VE_ADMIN_TOKEN")
        assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    sections = re.findall(r"^### (VisionEncoder\w+)$", DOCUMENT, re.MULTILINE)
    assert sections == names
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/deploy.md#{rule['alert'].lower()}"


# promtool


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        # Where the tests have to run, they may not be left out.
        assert not os.environ.get("REQUIRE_PROMTOOL"), "promtool is not on PATH"
        pytest.skip("promtool is not on PATH")
    return found


def run(*command: str, folder: Path) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULE["spec"]))
    run(promtool(), "check", "rules", "rules.yaml", folder=tmp_path)


def write_scenes(folder: Path, rules: Object) -> None:
    """The scenes and the rules as promtool reads them, without annotations: it would compare every word."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    (folder / "scenes.yaml").write_text(SCENES.read_text().replace("RULES", "rules.yaml"))


def fresh_rules() -> Object:
    found: Object = yaml.safe_load(yaml.safe_dump(RULE["spec"]))
    return found


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    write_scenes(tmp_path, fresh_rules())
    run(promtool(), "test", "rules", "scenes.yaml", folder=tmp_path)


@pytest.mark.parametrize("expression", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_never_fires_or_always_does_is_noticed(expression: str, tmp_path: Path) -> None:
    rules = fresh_rules()
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"], rule["for"] = expression, "0s"
    write_scenes(tmp_path, rules)
    with pytest.raises(AssertionError) as raised:
        run(promtool(), "test", "rules", "scenes.yaml", folder=tmp_path)
    assert {rule["alert"] for rule in RULES} <= set(re.findall(r"alertname: ?(\w+)", str(raised.value)))


def test_every_alert_has_a_scene_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    scenes = yaml.safe_load(SCENES.read_text())["tests"]
    cases = [case for scene in scenes for case in scene["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_the_scenes_series_are_of_metrics_and_labels_that_exist() -> None:
    for scene in yaml.safe_load(SCENES.read_text())["tests"]:
        for series in scene["input_series"]:
            assert strangers(series["series"]) == []


# Autoscalers


def behaviour(scaler: Object) -> Any:
    spec = scaler["spec"]
    if scaler["kind"] == "ScaledObject":
        return spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    return spec["behavior"]


@pytest.mark.parametrize("build", GPU_BUILDS)
def test_autoscalers_follow_gauges_that_exist(build: str) -> None:
    gauges = {row.name for row in ROWS if row.kind == "gauge"}
    (scaler,) = [*of_kind(built(build), "HorizontalPodAutoscaler"), *of_kind(built(build), "ScaledObject")]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", NAME)
    if scaler["kind"] == "ScaledObject":
        queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
        followed = {name for query in queries for name in re.findall(r"\bve_\w+", query)}
        assert all(strangers(query) == [] for query in queries)
        (namespace,) = of_kind(built(build), "Namespace")
        assert all(f'namespace="{namespace["metadata"]["name"]}"' in query for query in queries)
    else:
        followed = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert followed == {"ve_saturation_ratio", "ve_queued_device_seconds"}
    assert followed <= gauges
    down, up = behaviour(scaler)["scaleDown"], behaviour(scaler)["scaleUp"]
    assert down["stabilizationWindowSeconds"] >= 300 > up["stabilizationWindowSeconds"]


def test_both_autoscalers_have_the_same_targets_and_bounds() -> None:
    ours = named(built("gpu"), "HorizontalPodAutoscaler")
    theirs = named(built("gpu-keda"), "ScaledObject")
    targets = [quantity(metric["pods"]["target"]["averageValue"]) for metric in ours["spec"]["metrics"]]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in theirs["spec"]["triggers"]]
    assert targets == pytest.approx(thresholds)
    assert behaviour(ours) == behaviour(theirs)
    bounds = ours["spec"]["minReplicas"], ours["spec"]["maxReplicas"]
    assert bounds == (theirs["spec"]["minReplicaCount"], theirs["spec"]["maxReplicaCount"])
    assert bounds[0] <= theirs["spec"]["fallback"]["replicas"] <= bounds[1]


def test_the_queues_target_leaves_room_below_saturation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue at its target is not yet what counts as saturated."""
    metrics = {
        metric["pods"]["metric"]["name"]: quantity(metric["pods"]["target"]["averageValue"])
        for metric in named(built("gpu"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    settings = settings_of(built("gpu"), monkeypatch)
    assert metrics["ve_queued_device_seconds"] < settings.saturation_queue_s
    assert 0.7 <= metrics["ve_saturation_ratio"] <= 0.8


def test_the_adapters_values_serve_what_the_autoscaler_asks_for() -> None:
    values = yaml.safe_load((K8S / "components" / "hpa" / "prometheus-adapter.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    asked = {
        metric["pods"]["metric"]["name"]
        for metric in named(built("gpu"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    assert set(pattern.split("|")) == asked
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
