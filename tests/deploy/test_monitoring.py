"""Every metric is read by the dashboard, an alert or an autoscaler, and each of these reads real metrics.

promtool runs the alerts over the scenes of alerts.promtool.yaml.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import (
    CHART,
    GATEWAY,
    HELM_FOLDER,
    NAME,
    ROOT,
    Object,
    container_of,
    labels_of,
    named,
    of_kind,
    quantity,
    render,
    rendered,
    workload_of,
)
from tests.programs import program

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
SPEC = yaml.safe_load((CHART / "files" / "prometheusrule.yaml").read_text())["spec"]
RULES = [rule for group in SPEC["groups"] for rule in group["rules"]]
SCENES = Path(__file__).with_name("alerts.promtool.yaml")
METRIC = r"(?:ve|vllm:vision_encoder)_[a-z0-9_]+"
RUNBOOK = (ROOT / "docs" / "operations.md").read_text()


def metrics_in(text: str) -> set[str]:
    """Names of metrics in a text of queries, without the parts of a histogram and a counter's _total."""
    names = re.findall(rf"\b{METRIC}", text)
    return {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in names}


def registered_metrics() -> set[str]:
    """Names that the code of the service and of vLLM's plugin registers, each as a literal."""
    files = (path for folder in ("encoder_service", "lm_adapter") for path in (ROOT / folder).rglob("*.py"))
    found = (re.findall(rf'"({METRIC})"', path.read_text()) for path in files)
    return {name for names in found for name in metrics_in(" ".join(names))}


def test_every_metric_has_a_reader_and_every_reader_its_metric() -> None:
    readers = [
        json.dumps(DASHBOARD),
        yaml.safe_dump(SPEC),
        (HELM_FOLDER / "prometheus-adapter.yaml").read_text(),
    ]
    registered = registered_metrics()
    assert metrics_in(" ".join(readers)) == registered
    assert metrics_in(RUNBOOK) <= registered


# Alerts


def promtool(*arguments: str, folder: Path) -> str:
    """promtool's output on failure, else an empty text."""
    ended = subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.stdout + ended.stderr if ended.returncode else ""


def write_rules(folder: Path, **changes: str) -> None:
    """The rules without annotations, which promtool would compare word by word, and the scenes."""
    spec: Object = yaml.safe_load(yaml.safe_dump(SPEC))
    for group in spec["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
            rule |= changes
    (folder / "rules.yaml").write_text(yaml.safe_dump(spec))
    (folder / "scenes.yaml").write_text(SCENES.read_text().replace("RULES", "rules.yaml"))


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(SPEC))
    assert promtool("check", "rules", "all.yaml", folder=tmp_path) == ""
    write_rules(tmp_path)
    assert promtool("test", "rules", "scenes.yaml", folder=tmp_path) == ""


# Scraping


def test_the_monitor_finds_one_service_and_has_the_token() -> None:
    objects = rendered("gpu-node-local-gateway")
    monitor, service = named(objects, "ServiceMonitor")["spec"], named(objects, "Service")
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert {job for rule in RULES for job in re.findall(r'job="([^"]*)"', rule["expr"])} == {
        labels[monitor["jobLabel"]]
    }
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    # The readers' Service leads to the same pods, which would be scraped twice.
    selector = monitor["selector"]["matchLabels"].items()
    assert [
        each for each in of_kind(objects, "Service") if selector <= each["metadata"]["labels"].items()
    ] == [service]
    # Alerts on the encoders' job do not count gateways.
    gateways, labels = named(objects, "PodMonitor", GATEWAY)["spec"], labels_of(workload_of(objects, GATEWAY))
    assert gateways["selector"]["matchLabels"].items() <= labels.items()
    assert labels[gateways["jobLabel"]] != NAME
    secured = rendered("gpu-secured")
    (endpoint,) = named(secured, "ServiceMonitor")["spec"]["endpoints"]
    (token,) = (entry for entry in container_of(secured)["env"] if entry["name"] == "VE_ADMIN_TOKEN")
    assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]


# Autoscalers


def test_both_autoscalers_follow_the_same_gauges_to_the_same_targets() -> None:
    hpa = named(rendered("gpu"), "HorizontalPodAutoscaler")["spec"]
    keda = named(render({"autoscaling": {"kind": "keda"}}, release="other"), "ScaledObject", "other")["spec"]
    targets = {
        metric["pods"]["metric"]["name"]: quantity(metric["pods"]["target"]["averageValue"])
        for metric in hpa["metrics"]
    }
    assert targets == {"ve_saturation_ratio": 0.65, "ve_queued_device_seconds": 0.5}
    thresholds: dict[str, Any] = {}
    for trigger in keda["triggers"]:
        query = trigger["metadata"]["query"]
        (name,) = re.findall(r"\bve_\w+", query)
        assert '{namespace="tenant",service="other"}' in query
        thresholds[name] = float(trigger["metadata"]["threshold"])
    assert thresholds == targets
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    bounds = (hpa["minReplicas"], hpa["maxReplicas"])
    assert bounds == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert bounds[0] <= keda["fallback"]["replicas"] <= bounds[1]
    # Neither shares the number of replicas with the Deployment, nor leaves none at a disruption.
    assert "replicas" not in named(rendered("gpu"), "Deployment")["spec"]
    assert bounds[0] > named(rendered("gpu"), "PodDisruptionBudget")["spec"]["maxUnavailable"]
    adapter = yaml.safe_load((HELM_FOLDER / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert metrics_in(rule["seriesQuery"]) == set(targets)
