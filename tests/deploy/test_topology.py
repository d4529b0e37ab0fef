"""Who reaches whom: selectors, services, budgets, network policies, the shared tier, the shared node."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.rendering import (
    BUILDS,
    GPU_BUILDS,
    K8S,
    NAME,
    STANDS_FOR,
    Object,
    built,
    config_of,
    encoder,
    encoder_pod,
    environment_of,
    named,
    of_kind,
    pod_of,
    quantity,
    settings_of,
)

READER = yaml.safe_load((K8S / "examples" / "reader.yaml").read_text())


def labels_of(deployment: Object) -> dict[str, str]:
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return labels


def chosen(selector: dict[str, str], objects: Any) -> list[str]:
    """Deployments whose pods a selector takes."""
    return [
        each["metadata"]["name"]
        for each in of_kind(objects, "Deployment")
        if selector.items() <= labels_of(each).items()
    ]


@pytest.mark.parametrize("build", BUILDS)
def test_every_selector_takes_the_pods_of_one_deployment(build: str) -> None:
    for deployment in of_kind(built(build), "Deployment"):
        assert chosen(deployment["spec"]["selector"]["matchLabels"], built(build)) == [
            deployment["metadata"]["name"]
        ]
    for service in of_kind(built(build), "Service"):
        expected = "vision-encoder-valkey" if service["metadata"]["name"].endswith("valkey") else NAME
        assert chosen(service["spec"]["selector"], built(build)) == [expected]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        spec = named(built(build), kind)["spec"]
        assert chosen((spec.get("selector") or spec["podSelector"])["matchLabels"], built(build)) == [NAME]
    for constraint in encoder_pod(build)["topologySpreadConstraints"]:
        assert chosen(constraint["labelSelector"]["matchLabels"], built(build)) == [NAME]
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("build", BUILDS)
def test_the_service_is_headless_and_every_services_ports_lead_to_the_containers(build: str) -> None:
    assert named(built(build), "Service")["spec"]["clusterIP"] == "None"
    for service in of_kind(built(build), "Service"):
        (name,) = chosen(service["spec"]["selector"], built(build))
        (container,) = pod_of(named(built(build), "Deployment", name))["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            if port["name"] == "grpc":
                is_tls = "VE_TLS_CERT" in config_of(built(build))
                # IANA's names have no prefix, Kubernetes' own have.
                assert port["appProtocol"] == ("https" if is_tls else "kubernetes.io/h2c")


@pytest.mark.parametrize("build", BUILDS)
def test_a_voluntary_disruption_leaves_somebody(build: str) -> None:
    budget = named(built(build), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    rolling = named(built(build), "Deployment")["spec"]["strategy"]["rollingUpdate"]
    expected = (0, 1) if build in GPU_BUILDS else (1, 0)
    assert (rolling["maxSurge"], rolling["maxUnavailable"]) == expected
    scaled = [*of_kind(built(build), "HorizontalPodAutoscaler"), *of_kind(built(build), "ScaledObject")]
    assert len(scaled) == (build in GPU_BUILDS)
    for each in scaled:
        least = each["spec"].get("minReplicas", each["spec"].get("minReplicaCount"))
        assert least > budget["maxUnavailable"]
        # Two owners of one number would fight.
        assert "replicas" not in named(built(build), "Deployment")["spec"]


# Network policies


def peers(rules: list[Object], port: int) -> list[Object]:
    """Everything that the rules let through on a port."""
    found = [
        peer
        for rule in rules
        for peer in rule.get("from", rule.get("to", [{}]))
        if port in [each["port"] for each in rule["ports"]]
    ]
    assert found, f"nothing is let through on {port}"
    return found


@pytest.mark.parametrize("build", BUILDS)
def test_only_the_ports_that_exist_are_let_in_and_nothing_goes_out_but_names(build: str) -> None:
    policy = named(built(build), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = {port["name"]: port["containerPort"] for port in encoder(build)["ports"]}
    let_in = {each["port"] for rule in policy["ingress"] for each in rule["ports"]}
    assert let_in == set(ports.values())
    let_out = {each["port"] for rule in policy["egress"] for each in rule["ports"]}
    assert let_out == ({53, 6379} if build == "with-valkey" else {53})
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in peers(policy["egress"], 53)
    # A rule without peers would be for everybody.
    assert all(rule["from"] for rule in policy["ingress"])
    if build != "cpu-dev":
        admins = peers(policy["ingress"], ports["admin"])
        assert admins == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]


def test_the_reader_is_let_in_by_its_label() -> None:
    policy = named(built("gpu-shared-node"), "NetworkPolicy")["spec"]
    clients = [
        peer["podSelector"]["matchLabels"]
        for peer in peers(policy["ingress"], 50051)
        if "podSelector" in peer
    ]
    assert any(labels.items() <= labels_of(READER).items() for labels in clients)


# The shared tier


def test_encoders_and_nobody_else_reach_valkey(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = built("with-valkey")
    settings = settings_of(objects, monkeypatch)
    assert settings.shared_url is not None
    service = named(objects, "Service", "vision-encoder-valkey")
    (port,) = service["spec"]["ports"]
    host = STANDS_FOR["VE_SHARED_URL"].rpartition("@")[2].partition("/")[0]
    assert host == f"{service['metadata']['name']}:{port['port']}"
    policy = named(objects, "NetworkPolicy", "vision-encoder-valkey")["spec"]
    (callers,) = peers(policy["ingress"], port["port"])
    assert chosen(callers["podSelector"]["matchLabels"], objects) == [NAME]
    assert policy["egress"] == []
    (target,) = peers(named(objects, "NetworkPolicy")["spec"]["egress"], port["port"])
    assert chosen(target["podSelector"]["matchLabels"], objects) == ["vision-encoder-valkey"]


def test_p17_valkey_is_bounded_and_throws_out_what_is_not_used() -> None:
    (server,) = pod_of(named(built("with-valkey"), "Deployment", "vision-encoder-valkey"))["containers"]
    given = dict(zip(server["args"][1::2], server["args"][2::2], strict=True))
    assert 1.2 * quantity(given["--maxmemory"]) <= quantity(server["resources"]["limits"]["memory"])
    assert given["--maxmemory-policy"] == "allkeys-lru"
    assert (given["--save"], given["--appendonly"]) == ("", "no")
    assert given["--requirepass"] == f"$({server['env'][0]['name']})"


# The shared node


def test_the_reader_mounts_the_brokers_folder_where_the_encoder_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(built("gpu-shared-node"), monkeypatch)
    pods = {"encoder": encoder_pod("gpu-shared-node"), "reader": pod_of(READER)}
    paths = set()
    for who, pod in pods.items():
        (container,) = pod["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "broker")
        (volume,) = (each for each in pod["volumes"] if each["name"] == "broker")
        paths.add((mount["mountPath"], volume["hostPath"]["path"], volume["hostPath"]["type"]))
        assert mount.get("readOnly", False) is (who == "reader")
    # What GetServerInfo tells is the encoder's path: the reader has to find the socket under the same.
    ((path, _, kind),) = paths
    assert settings.broker_path.startswith(path + "/")
    # Whichever of the two comes first makes it.
    assert kind == "DirectoryOrCreate"
    group = encoder_pod("gpu-shared-node")["securityContext"]["runAsGroup"]
    assert group in pod_of(READER)["securityContext"]["supplementalGroups"]
    assert settings.broker_mode == "660"


def test_encoders_of_one_node_have_sockets_of_their_own() -> None:
    path = environment_of(built("gpu-shared-node"))["VE_BROKER_PATH"]
    assert STANDS_FOR["POD_NAME"] in path
    # A chart's name has at most 40 characters, a ReplicaSet's hash and a pod's 17 more; a socket's path 107.
    folder = path.partition(STANDS_FOR["POD_NAME"])[0]
    assert len(folder) + 40 + 17 + len(".sock") <= 107


def test_encoders_are_drawn_to_readers_and_their_address_stays_on_the_node() -> None:
    (rule,) = encoder_pod("gpu-shared-node")["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert rule["labelSelector"]["matchLabels"].items() <= labels_of(READER).items()
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["namespaceSelector"] == {}
    service = named(built("gpu-shared-node"), "Service", "vision-encoder-local")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    (address,) = (entry["value"] for entry in pod_of(READER)["containers"][0]["env"])
    namespace = service["metadata"]["namespace"]
    assert address == f"{service['metadata']['name']}.{namespace}.svc:{service['spec']['ports'][0]['port']}"
