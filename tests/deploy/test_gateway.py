"""The chart's gateway: Envoy takes its configuration, the pod and the Services fit it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from encoder_service.serve import LEAVE_S
from tests.certificates import Authority
from tests.deploy.chart import (
    CASES,
    CHART,
    GATEWAY,
    GATEWAY_CASES,
    NAME,
    Object,
    container_of,
    files_of,
    gateway_command,
    helm,
    named,
    pod_of,
    quantity,
    render,
    rendered,
    workload_of,
)


def addresses(config: Object) -> dict[str, tuple[str, int]]:
    """Where Envoy listens, by the listener's name, and as ``admin``."""
    found = {each["name"]: each["address"] for each in config["static_resources"]["listeners"]}
    found["admin"] = config["admin"]["address"]
    return {
        name: (each["socket_address"]["address"], each["socket_address"]["port_value"])
        for name, each in found.items()
    }


# The configuration


@pytest.mark.parametrize("case", GATEWAY_CASES)
def test_envoy_takes_the_configuration(case: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    files = authority.issue("tls")
    authority.ca.rename(tmp_path / "ca.crt")
    files.cert.rename(tmp_path / "tls.crt")
    command = gateway_command(rendered(case), tmp_path)
    assert ("TlsContext" in (tmp_path / "gateway.yaml").read_text()) is ("secured" in CASES[case])
    ended = subprocess.run(
        [*command, "--mode", "validate", "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "warning" not in ended.stderr, ended.stderr


def test_a_packaged_chart_renders_what_the_folder_renders(tmp_path: Path) -> None:
    """Its links to deploy/envoy become files."""
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    for case in GATEWAY_CASES:
        found = helm("template", NAME, str(package), *files_of(case), "--namespace=tenant")
        assert [each for each in yaml.safe_load_all(found) if each] == rendered(case)


# The pod


@pytest.mark.parametrize("case", GATEWAY_CASES)
def test_the_pod_fits_the_configuration(case: str) -> None:
    objects = rendered(case)
    files, container = named(objects, "ConfigMap", GATEWAY)["data"], container_of(objects, GATEWAY)
    config = yaml.safe_load(files["gateway.yaml"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert addresses(config) == {
        "calls": ("0.0.0.0", ports["grpc"]),
        "operations": ("0.0.0.0", ports["operations"]),
        "admin": ("127.0.0.1", 9901),
    }
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    paths = re.findall(r"/etc/[\w-]+", " ".join([*files.values(), *container["args"]]))
    assert set(paths) == mounts
    (heap,) = (
        each["typed_config"]["max_heap_size_bytes"]
        for each in config["overload_manager"]["resource_monitors"]
        if each["name"] == "envoy.resource_monitors.fixed_heap"
    )
    assert quantity(container["resources"]["limits"]["memory"]) >= 1.25 * heap
    # By default Envoy starts a thread for every core of its node.
    threads = int(container["args"][container["args"].index("--concurrency") + 1])
    assert threads == max(1, quantity(container["resources"]["requests"]["cpu"]))
    drain_s = float(container["lifecycle"]["preStop"]["exec"]["command"][-1].split()[-1])
    assert pod_of(objects, GATEWAY)["terminationGracePeriodSeconds"] >= drain_s + 5
    # As long as an encoder that stops can still have calls.
    pre_stop_s = container_of(objects)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = float(named(objects, "ConfigMap", f"{NAME}-config")["data"]["VE_DRAIN_GRACE_S"])
    assert drain_s >= pre_stop_s + LEAVE_S + grace_s
    assert workload_of(objects, GATEWAY)["spec"]["replicas"] == 2


def test_a_change_of_the_configuration_rolls_the_pods() -> None:
    def annotations(**values: object) -> Object:
        objects = render({"gateway": {"enabled": True, **values}})
        found: Object = workload_of(objects, GATEWAY)["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations() == annotations(replicas=3) != annotations(maxHeapBytes="1000000000")
