"""The chart as `helm` renders it, and ways to find things in it.

Owns the cases (sets of values files), the call of helm, and the way from a pod to its service's settings.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
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
    "gpu": ("gpu",),
    "gpu-broker": ("gpu", "broker"),
    "gpu-secured": ("gpu", "secured"),
}
GPU_CASES = [case for case in CASES if case.startswith("gpu")]
# Values of variables that the kubelet takes from elsewhere.
FROM_ELSEWHERE = {"POD_NAME": "vision-encoder-7d4b9c6f58-x2x7p", "VE_ADMIN_TOKEN": "an-admin-token"}
KUBERNETES_VERSIONS = ("1.30", "1.33")


def _fields(required: str, **properties: Any) -> Any:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": {name: {} if schema is ... else schema for name, schema in properties.items()},
    }


# Fields of the chart's custom resources, after their references (Prometheus operator v1, KEDA v1alpha1): an
# API server drops others silently. promtool checks the rules, the autoscaler's schema the behaviour.
CUSTOM_RESOURCES = {
    "PrometheusRule": _fields("groups", groups={"type": "array"}),
    "ServiceMonitor": _fields(
        "selector endpoints",
        jobLabel=...,
        selector=_fields("matchLabels", matchLabels=...),
        endpoints={
            "items": _fields("port", port=..., path=..., interval=..., scrapeTimeout=..., authorization=...)
        },
    ),
    "ScaledObject": _fields(
        "scaleTargetRef triggers",
        scaleTargetRef=_fields("name", apiVersion=..., kind=..., name=...),
        pollingInterval=...,
        minReplicaCount=...,
        maxReplicaCount=...,
        fallback=_fields("failureThreshold replicas", failureThreshold=..., replicas=...),
        advanced=_fields("", horizontalPodAutoscalerConfig=_fields("", behavior=...)),
        triggers={
            "items": _fields(
                "type metadata",
                type={"const": "prometheus"},
                metricType={"const": "AverageValue"},
                metadata=_fields(
                    "serverAddress query threshold",
                    serverAddress=...,
                    query=...,
                    ignoreNullValues={"const": "false"},
                    threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                ),
            )
        },
    ),
}  # fmt: skip


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
    """Raises a validation error for an object that does not fit its schema in one of the versions."""
    for found in objects:
        if found["kind"] in CUSTOM_RESOURCES:
            jsonschema.validate(found["spec"], CUSTOM_RESOURCES[found["kind"]])
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)


def named(objects: Iterable[Object], kind: str, name: str = NAME) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pod_of(objects: Iterable[Object], name: str = NAME) -> Object:
    """The pod's spec of a Deployment."""
    spec: Object = named(objects, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def encoder_of(objects: Iterable[Object], name: str = NAME) -> Object:
    (found,) = pod_of(objects, name)["containers"]
    container: Object = found
    return container


def environment_of(objects: Sequence[Object]) -> dict[str, str]:
    """Environment of the encoder's process."""
    found: dict[str, str] = dict(named(objects, "ConfigMap", f"{NAME}-config")["data"])
    for entry in encoder_of(objects).get("env", ()):
        value = entry.get("value") or FROM_ELSEWHERE[entry["name"]]
        for name, text in found.items():
            value = value.replace(f"$({name})", text)
        found[entry["name"]] = value
    return found


def settings_of(objects: Sequence[Object], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """By the service's own parser, which refuses unknown names."""
    for name, value in environment_of(objects).items():
        monkeypatch.setenv(name, value)
    return parse_settings()


def quantity(text: str | int) -> float:
    """A Kubernetes quantity as a number."""
    units = {"": 1, "m": 0.001, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    digits = str(text).rstrip("KMGim")
    return float(digits) * units[str(text)[len(digits) :]]
