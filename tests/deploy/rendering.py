"""What the tests of the manifests look at: every overlay, built once, and ways to find things in it.

Owns names and the way from a pod to the settings that its process would have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from encoder_service.config import Settings, parse_settings
from tests.deploy import kustomize
from tests.deploy.go_template import Chart

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
CHART = ROOT / "deploy" / "helm" / "vision-encoder"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
BUILDS = ["base", *OVERLAYS]
GPU_BUILDS = [name for name in BUILDS if name not in ("base", "cpu-dev")]
NAME = "vision-encoder"
UNITS = {
    "": 1,
    "m": 0.001,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "kb": 1 << 10,
    "mb": 1 << 20,
    "gb": 1 << 30,
}
# What the kubelet would put in, and what the Secrets hold.
STANDS_FOR = {
    "POD_NAME": "vision-encoder-7d4b9c6f58-x2x7p",
    "VE_ADMIN_TOKEN": "an-admin-token",
    "VE_SHARED_URL": "redis://:password@vision-encoder-valkey:6379/0",
    "VE_SHARED_SECRET": "at-least-sixteen-characters",
}


def folder_of(build: str) -> Path:
    return K8S / "base" if build == "base" else K8S / "overlays" / build


@functools.cache
def built(build: str) -> tuple[Object, ...]:
    return tuple(kustomize.build(folder_of(build)))


@functools.cache
def charted(build: str) -> tuple[Object, ...]:
    """The chart with the values file of the same name; the base is the chart as it is."""
    chart = Chart(CHART)
    more = [] if build == "base" else [yaml.safe_load((CHART / f"values-{build}.yaml").read_text())]
    return tuple(chart.render(chart.values(*more), release=NAME, namespace=NAME))


def named(objects: Iterable[Object], kind: str, name: str = NAME) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def pod_of(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def encoder_pod(build: str) -> Object:
    return pod_of(named(built(build), "Deployment"))


def encoder(build: str) -> Object:
    (found,) = encoder_pod(build)["containers"]
    container: Object = found
    return container


def config_of(objects: Iterable[Object]) -> dict[str, str]:
    """The data of the ConfigMap that the encoder's pod names."""
    objects = list(objects)
    (container,) = pod_of(named(objects, "Deployment"))["containers"]
    (source,) = container["envFrom"]
    data: dict[str, str] = named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    return data


def environment_of(objects: Iterable[Object]) -> dict[str, str]:
    """What the encoder's process would find."""
    objects = list(objects)
    found = dict(config_of(objects))
    (container,) = pod_of(named(objects, "Deployment"))["containers"]
    for entry in container.get("env", ()):
        value = entry.get("value", STANDS_FOR.get(entry["name"]))
        assert value is not None, (
            f"{entry['name']} comes from elsewhere, and this test does not know what it is"
        )
        for name, text in found.items():
            value = value.replace(f"$({name})", text)
        found[entry["name"]] = value
    return found


def settings_of(objects: Iterable[Object], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """By the service's own parser, which refuses what is no setting."""
    for name, value in environment_of(objects).items():
        monkeypatch.setenv(name, value)
    return parse_settings()


def quantity(text: str | int) -> float:
    """A Kubernetes quantity, or a size as Valkey writes it, as a number."""
    digits = str(text).rstrip("KMGTikmgb")
    return float(digits) * UNITS[str(text)[len(digits) :]]
