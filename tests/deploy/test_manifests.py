"""Every overlay: fits the schemas, is understood by the settings' parser, and its parts fit each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import encoder_service
from encoder_service.app import ENGINE_STOP_S, LAST_SPANS_S
from encoder_service.rpc.server import SERVICE
from tests.deploy import custom_resources
from tests.deploy.rendering import (
    BUILDS,
    GPU_BUILDS,
    K8S,
    NAME,
    OVERLAYS,
    built,
    charted,
    config_of,
    encoder,
    encoder_pod,
    named,
    of_kind,
    pod_of,
    quantity,
    settings_of,
)

KUBERNETES_VERSIONS = ("1.30", "1.33")
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
ONE_GPU = {"nvidia.com/gpu": "1"}


def validate(found: dict[str, Any], version: str) -> None:
    if found["kind"] in custom_resources.KINDS:
        custom_resources.validate(found)
    else:
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("build", BUILDS)
def test_every_object_fits_its_schema(build: str, version: str) -> None:
    for objects in (built(build), charted(build)):
        for found in objects:
            validate(found, version)


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "HorizontalPodAutoscaler", "ServiceMonitor"])
def test_the_schema_check_notices_a_misspelt_field(kind: str) -> None:
    found = copy.deepcopy(named(built("gpu"), kind))
    found["spec"]["podSelectors"] = {}
    with pytest.raises(Exception, match="podSelectors"):
        validate(found, KUBERNETES_VERSIONS[0])


def test_the_examples_fit_their_schemas() -> None:
    for found in yaml.safe_load_all((K8S / "examples" / "reader.yaml").read_text()):
        validate(found, KUBERNETES_VERSIONS[0])


def test_every_component_is_used_or_tested() -> None:
    used = set()
    for overlay in OVERLAYS:
        given = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())
        used |= {Path(name).name for name in given.get("components", ())}
    assert {path.name for path in (K8S / "components").iterdir()} - used == {"fetch-weights"}


# Settings


@pytest.mark.parametrize("build", BUILDS)
def test_the_settings_are_taken_and_match_the_ports(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(built(build), monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in encoder(build)["ports"]}
    assert ports.keys() == {"grpc", "admin"}
    assert settings.listen == (f"0.0.0.0:{ports['grpc']}", "unix:/run/vision-encoder/encoder.sock")
    assert settings.admin_listen == f"0.0.0.0:{ports['admin']}"
    assert settings.device == ("cuda:0" if build in GPU_BUILDS else "cpu")
    assert all(name.startswith("VE_") for name in config_of(built(build)))


def test_a_setting_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = copy.deepcopy(built("base"))
    config_of(objects)["VE_STORE_BYTE"] = "1"
    with pytest.raises(Exception, match="VE_STORE_BYTE"):
        settings_of(objects, monkeypatch)


@pytest.mark.parametrize("build", BUILDS)
def test_p37_the_pod_has_time_to_drain(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(built(build), monkeypatch)
    before_stop_s = encoder(build)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = encoder_pod(build)["terminationGracePeriodSeconds"]
    # After the drain: a batch that has not ended, and the last spans.
    assert grace_s >= before_stop_s + settings.drain_grace_s + ENGINE_STOP_S + LAST_SPANS_S + 2
    # Clients have heard by then: readiness is given up, and the address with it.
    assert before_stop_s >= 5


@pytest.mark.parametrize("build", BUILDS)
def test_p17_memory_limit_covers_what_is_held(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and content take at most half of the limit; weights, activations and libraries have the rest."""
    settings = settings_of(built(build), monkeypatch)
    held_bytes = settings.arena_bytes if settings.broker_path else settings.store_bytes
    limits = encoder(build)["resources"]["limits"]
    assert 2 * (held_bytes + settings.max_queued_bytes) <= quantity(limits["memory"])
    # Beside those, what callers have not read yet, and an image of the largest size on every thread: not at
    # the edge, since there are weights and libraries too.
    decoded_bytes = settings.ingest_threads * settings.max_image_pixels * 3
    most_bytes = held_bytes + settings.max_queued_bytes + settings.max_undelivered_bytes + decoded_bytes
    assert most_bytes <= 0.7 * quantity(limits["memory"])
    assert encoder(build)["resources"]["requests"].keys() == {"cpu", "memory"}
    assert {k: v for k, v in limits.items() if k != "memory"} == (ONE_GPU if build in GPU_BUILDS else {})


@pytest.mark.parametrize("build", BUILDS)
def test_threads_are_not_as_many_as_a_large_node_has_cores(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit of CPU time a process sees every core of its node, and takes one thread for each; torch
    starts as many again in every thread that decodes. A kubelet's limit of processes is 1024 at the least."""
    settings = settings_of(built(build), monkeypatch)
    assert "cpu" not in encoder(build)["resources"]["limits"]
    assert 1 <= settings.ingest_threads <= 16
    assert 1 <= settings.torch_threads <= 8
    assert settings.ingest_threads * settings.torch_threads <= 64


@pytest.mark.parametrize("build", BUILDS)
def test_a_rollout_is_given_longer_than_its_pods_may_take_to_start(build: str) -> None:
    probe = encoder(build)["startupProbe"]
    deadline_s = named(built(build), "Deployment")["spec"]["progressDeadlineSeconds"]
    assert deadline_s >= 1.5 * probe["periodSeconds"] * probe["failureThreshold"]


# Images and what they run as


@pytest.mark.parametrize("build", BUILDS)
def test_images_carry_the_projects_version(build: str) -> None:
    variant = "cuda" if build in GPU_BUILDS else "cpu"
    version = encoder_service.__version__
    images = [each["image"] for each in (*encoder_pod(build).get("initContainers", ()), encoder(build))]
    assert set(images) <= {f"{NAME}:{version}-{variant}", f"{NAME}:{version}-cpu"}
    assert images[-1] == f"{NAME}:{version}-{variant}"


@pytest.mark.parametrize("build", BUILDS)
def test_security_contexts_are_the_strictest(build: str) -> None:
    for deployment in of_kind(built(build), "Deployment"):
        pod = pod_of(deployment)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} == set()
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert pod["serviceAccountName"] == NAME
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["resources"]["limits"]["memory"]
            if container["name"] != "socket-folder":
                assert container["securityContext"] == RESTRICTED
    account = named(built(build), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False


def test_the_one_container_of_roots_may_change_one_folder_and_nothing_else() -> None:
    (folder,) = encoder_pod("gpu-shared-node")["initContainers"]
    assert folder["securityContext"] == RESTRICTED | {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
    }
    (mount,) = folder["volumeMounts"]
    assert folder["command"][-1].split().count(mount["mountPath"]) == 2


@pytest.mark.parametrize("build", OVERLAYS)
def test_the_namespaces_pod_security_is_as_strict_as_its_volumes_let_it_be(build: str) -> None:
    (namespace,) = of_kind(built(build), "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    uses_host = any("hostPath" in volume for volume in encoder_pod(build)["volumes"])
    assert level == ("privileged" if uses_host else "restricted")
    for found in built(build):
        if found["kind"] != "Namespace":
            assert found["metadata"]["namespace"] == namespace["metadata"]["name"]


# Probes


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_what_is_there(build: str, probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC health by the service's own name; with TLS, which the kubelet's gRPC probes do not speak, the
    admin plane, whose two pages are open without a token."""
    container = encoder(build)
    settings = settings_of(built(build), monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    found = container[probe]
    if settings.tls_cert is None:
        assert found["grpc"] == {"port": ports["grpc"], "service": SERVICE}
        assert "httpGet" not in found
    else:
        assert settings.admin_tls is False
        path = "/healthz" if probe == "livenessProbe" else "/readyz"
        assert found["httpGet"] == {"path": path, "port": "admin"}
        assert "grpc" not in found
    assert found["timeoutSeconds"] <= found["periodSeconds"]


@pytest.mark.parametrize("build", BUILDS)
def test_a_pod_has_minutes_to_start_and_is_not_restarted_sooner_than_unready(build: str) -> None:
    def patience_s(probe: str) -> int:
        found = encoder(build)[probe]
        return int(found["periodSeconds"] * found["failureThreshold"])

    assert patience_s("startupProbe") >= (600 if build in GPU_BUILDS else 120)
    assert patience_s("livenessProbe") > patience_s("readinessProbe")


# Volumes


@pytest.mark.parametrize("build", BUILDS)
def test_every_mount_has_its_volume_and_what_is_written_is_bounded(build: str) -> None:
    for deployment in of_kind(built(build), "Deployment"):
        pod = pod_of(deployment)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes.keys()
        for name, volume in volumes.items():
            if "emptyDir" in volume:
                assert quantity(volume["emptyDir"]["sizeLimit"]) > 0, name
            # One source: a patch that adds another leaves two.
            assert len(volume) == 2, volume


@pytest.mark.parametrize("build", BUILDS)
def test_every_file_that_a_setting_names_is_mounted(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(built(build), monkeypatch)
    mounts = {Path(mount["mountPath"]): mount for mount in encoder(build)["volumeMounts"]}
    sockets = [address.removeprefix("unix:") for address in settings.listen if address.startswith("unix:")]
    read = [settings.model, settings.tls_cert, settings.tls_key, settings.tokens_file]
    written = [*sockets, settings.broker_path]
    for path, is_read in [*((path, True) for path in read), *((path, False) for path in written)]:
        if not path:
            continue
        (mount,) = (mounts[folder] for folder in (Path(path), *Path(path).parents) if folder in mounts)
        assert mount.get("readOnly", False) is is_read
    volumes = {volume["name"]: volume for volume in encoder_pod(build)["volumes"]}
    for volume, files in (("tls", {"tls.crt", "tls.key"}), ("tokens", {"tokens"})):
        named_files = {Path(path).name for path in read if path and f"/{volume}/" in str(path)}
        assert named_files == (files if volume in volumes else set())


@pytest.mark.parametrize("build", BUILDS)
def test_every_config_map_and_secret_that_is_named_is_there_or_made_by_the_script(build: str) -> None:
    text = yaml.safe_dump_all(of_kind(built(build), "Deployment"))
    maps = {each["metadata"]["name"] for each in of_kind(built(build), "ConfigMap")}
    assert set(re.findall(r"configMap\w*:\n\s+(?:key: \S+\n\s+)?name: (\S+)", text)) <= maps
    secrets = set(re.findall(r"secretName: (\S+)", text))
    secrets |= set(re.findall(r"secretKeyRef:\n\s+key: \S+\n\s+name: (\S+)", text))
    script = (K8S / "make-secrets.sh").read_text()
    made = {f"{NAME}-{kind}" for kind in re.findall(r'\| secret "\$name-(\w+)"', script)}
    assert secrets <= made
    assert bool(secrets) == (build in ("gpu-secured", "with-valkey"))
