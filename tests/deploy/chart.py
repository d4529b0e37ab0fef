"""The chart as `helm` renders it, and ways to find things in it.

Owns the cases (sets of values files), the call of helm, and the way from a pod to its service's settings.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from encoder_service.config import Settings, parse_settings
from tests.programs import program

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
HELM_FOLDER = ROOT / "deploy" / "helm"
CHART = HELM_FOLDER / "vision-encoder"
NAME = "vision-encoder"
CASES: dict[str, tuple[str, ...]] = {
    "default": (),
    "cpu-dev": ("cpu-dev",),
    "cpu-dev-gateway": ("cpu-dev", "gateway"),
    "gpu": ("gpu",),
    "gpu-gateway": ("gpu", "gateway"),
    "gpu-node-local": ("gpu", "node-local"),
    "gpu-node-local-gateway": ("gpu", "node-local", "gateway"),
    "gpu-secured": ("gpu", "secured"),
    "gpu-secured-gateway": ("gpu", "secured", "gateway"),
}
GPU_CASES = [case for case in CASES if case.startswith("gpu")]
GATEWAY_CASES = [case for case in CASES if case.endswith("gateway")]
GATEWAY = f"{NAME}-gateway"
# Values of variables that the kubelet takes from elsewhere.
FROM_ELSEWHERE = {"POD_NAME": "vision-encoder-7d4b9c6f58-x2x7p", "VE_ADMIN_TOKEN": "an-admin-token"}
# The chart's oldest, and the newest of kubernetes-validate's schemas, which are the API servers' own.
KUBERNETES_VERSIONS = ("1.30", "1.37")


# Fields of the chart's custom resources, after their references (Prometheus operator v1, KEDA v1alpha1): an
# API server drops others silently. promtool checks the rules.
MONITOR_FIELDS = "jobLabel selector matchLabels port path interval scrapeTimeout authorization"
CUSTOM_RESOURCES = {
    "PrometheusRule": "groups",
    "ServiceMonitor": f"{MONITOR_FIELDS} endpoints",
    "PodMonitor": f"{MONITOR_FIELDS} podMetricsEndpoints",
    "ScaledObject": (
        "scaleTargetRef apiVersion kind name pollingInterval minReplicaCount maxReplicaCount fallback "
        "failureThreshold replicas advanced horizontalPodAutoscalerConfig behavior triggers type metricType "
        "metadata serverAddress query threshold ignoreNullValues"
    ),
}
# Whose values other schemas describe.
OPEN_FIELDS = ("matchLabels", "groups", "behavior", "authorization")


def fields_of(spec: Any) -> set[str]:
    """The names of all fields of a custom resource."""
    if isinstance(spec, list):
        return set().union(*map(fields_of, spec))
    if not isinstance(spec, dict):
        return set()
    inner = (fields_of(value) for name, value in spec.items() if name not in OPEN_FIELDS)
    return set(spec).union(*inner)


class RenderingFailed(Exception):
    """helm's message."""


def helm(*arguments: str, values: str = "") -> str:
    """Standard output. Raises RenderingFailed."""
    ended = subprocess.run(
        [program("helm"), *arguments], input=values, capture_output=True, text=True, timeout=60, check=False
    )
    if ended.returncode:
        raise RenderingFailed(ended.stderr + ended.stdout)
    return ended.stdout


def files_of(case: str) -> list[str]:
    """Options that lay the case's values files over the chart's."""
    return [f"--values={CHART / f'values-{name}.yaml'}" for name in CASES[case]]


def render(
    *values: Object, case: str = "default", release: str = NAME, namespace: str = "tenant"
) -> list[Object]:
    """Objects of a release with these values over the case's. Raises RenderingFailed."""
    merged: Object = {}
    for each in values:
        merged |= each
    options = [*files_of(case), "--values=-", f"--namespace={namespace}"]
    found = helm("template", release, str(CHART), *options, values=json.dumps(merged))
    return [each for each in yaml.safe_load_all(found) if each]


@functools.cache
def _rendered(case: str) -> str:
    return json.dumps(render(case=case))


def rendered(case: str) -> list[Object]:
    """Objects of the case with nothing laid over it."""
    found: list[Object] = json.loads(_rendered(case))
    return found


def validate(objects: Iterable[Object]) -> None:
    """Raises an error for an object that does not fit its schema in one of the versions."""
    for found in objects:
        if found["kind"] in CUSTOM_RESOURCES:
            assert fields_of(found["spec"]) <= {*CUSTOM_RESOURCES[found["kind"]].split()}
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)


def named(objects: Iterable[Object], kind: str, name: str = NAME) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def workloads_of(objects: Iterable[Object]) -> list[Object]:
    return of_kind(objects, "Deployment", "DaemonSet")


def labels_of(workload: Object) -> Object:
    """Of its pods."""
    labels: Object = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def workload_of(objects: Iterable[Object], name: str = NAME) -> Object:
    """The Deployment or DaemonSet."""
    (found,) = (each for each in workloads_of(objects) if each["metadata"]["name"] == name)
    return found


def pod_of(objects: Iterable[Object], name: str = NAME) -> Object:
    """The spec of a workload's pod."""
    spec: Object = workload_of(objects, name)["spec"]["template"]["spec"]
    return spec


def container_of(objects: Iterable[Object], name: str = NAME) -> Object:
    """The only container of a workload's pod, init containers aside."""
    (found,) = pod_of(objects, name)["containers"]
    container: Object = found
    return container


def environment_of(objects: Sequence[Object]) -> dict[str, str]:
    """Environment of the encoder's process."""
    found: dict[str, str] = dict(named(objects, "ConfigMap", f"{NAME}-config")["data"])
    container = container_of(objects)
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {}).get("resourceFieldRef")
        if source is not None:
            kind, _, name = source["resource"].partition(".")
            entry = {
                "name": entry["name"],
                "value": str(math.ceil(quantity(container["resources"][kind][name]))),
            }
        value = entry.get("value") or FROM_ELSEWHERE[entry["name"]]
        for name, text in found.items():
            value = value.replace(f"$({name})", text)
        found[entry["name"]] = value
    return found


def gateway_command(
    objects: Sequence[Object], folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Envoy with the arguments of the pod, and the files of its ConfigMap in a folder, with texts changed.

    Certificates are in the folder too.
    """
    files = named(objects, "ConfigMap", GATEWAY)["data"]
    assert all(any(old in text for text in files.values()) for old in changes)
    for name, text in files.items():
        for old, new in (*changes.items(), ("/etc/gateway-tls", str(folder)), ("/etc/gateway", str(folder))):
            text = text.replace(old, new)
        (folder / name).write_text(text)
    arguments = container_of(objects, GATEWAY)["args"]
    return [program("envoy"), *(each.replace("/etc/gateway", str(folder)) for each in arguments)]


def settings_of(objects: Sequence[Object], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """By the service's own parser, which refuses unknown names. The images start without a broker."""
    monkeypatch.setenv("VE_BROKER_PATH", "")
    for name, value in environment_of(objects).items():
        monkeypatch.setenv(name, value)
    return parse_settings()


def is_let_in(objects: Iterable[Object], pod: Object, port: int, peer: Object, namespace: Object) -> bool:
    """Whether NetworkPolicies let a pod with labels ``peer``, of a namespace with labels, in to a pod's port.

    The subset that the chart uses: selectors by matchLabels or empty. The policies' namespace is "tenant".
    """

    def takes(selector: Object, labels: Object) -> bool:
        assert selector.keys() <= {"matchLabels"}
        return bool(selector.get("matchLabels", {}).items() <= labels.items())

    def is_peer(rule: Object) -> bool:
        assert rule.keys() <= {"podSelector", "namespaceSelector"}
        assert rule
        own = {"matchLabels": {"kubernetes.io/metadata.name": "tenant"}}
        return takes(rule.get("podSelector", {}), peer) and takes(
            rule.get("namespaceSelector", own), namespace
        )

    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
    rules = [rule for each in policies if takes(each["podSelector"], pod) for rule in each["ingress"]]
    return any(
        is_peer(each)
        for rule in rules
        if port in {to["port"] for to in rule["ports"]}
        for each in rule["from"]
    )


def quantity(text: str | int) -> float:
    """A Kubernetes quantity as a number."""
    units = {"": 1, "m": 0.001, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    digits = str(text).rstrip("KMGim")
    return float(digits) * units[str(text)[len(digits) :]]
