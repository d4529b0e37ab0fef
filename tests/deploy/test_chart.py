"""The chart: objects fit their schemas, the service accepts the settings, contradictions are refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

import encoder_service
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc.server import SERVICE
from encoder_service.serve import ENGINE_STOP_S, LAST_SPANS_S, LEAVE_S
from tests.deploy.chart import (
    CASES,
    CHART,
    FROM_ELSEWHERE,
    GATEWAY,
    GATEWAY_CASES,
    GPU_CASES,
    HELM_FOLDER,
    NAME,
    Object,
    RenderingFailed,
    container_of,
    environment_of,
    files_of,
    helm,
    is_let_in,
    labels_of,
    named,
    of_kind,
    pod_of,
    quantity,
    render,
    rendered,
    settings_of,
    validate,
    workload_of,
    workloads_of,
)

READER = yaml.safe_load((HELM_FOLDER / "reader.yaml").read_text())
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
HUB_MODEL = {"VE_MODEL": "acme/Seeing-8B@v1"}
EVERYTHING: Object = {
    "monitoring": {"enabled": True},
    "gateway": {"enabled": True},
    "broker": {"enabled": True},
    "tls": {"enabled": True},
    "tokens": {"enabled": True, "file": "a=1\n", "admin": "9"},
    "autoscaling": {"kind": "keda"},
    "weights": {"source": "hub"},
    "settings": HUB_MODEL,
}


# The chart as a whole


@pytest.mark.parametrize("case", CASES)
def test_helm_lints_the_chart_and_every_object_fits_its_schema(case: str) -> None:
    helm("lint", "--strict", "--quiet", str(CHART), *files_of(case))
    validate(rendered(case))


@pytest.mark.parametrize(("release", "name"), [("123", "enc"), ("with.dots", "")])
def test_everything_at_once_is_valid_for_any_name_of_a_release(release: str, name: str) -> None:
    objects = render(EVERYTHING, {"fullnameOverride": name}, release=release)
    validate(objects)
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects} == {release}


def test_the_chart_has_the_projects_version_and_images() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert meta["version"] == meta["appVersion"] == encoder_service.__version__
    for case in CASES:
        variant = "cuda" if case in GPU_CASES else "cpu"
        assert container_of(rendered(case))["image"] == f"{NAME}:{encoder_service.__version__}-{variant}"


def test_two_releases_of_one_namespace_share_no_object_and_no_pod() -> None:
    one, other = (render(EVERYTHING, release=release) for release in ("one", "other"))
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, other)]
    assert not names[0] & names[1]
    for workload in ("", "-gateway"):
        selector = workload_of(one, f"one{workload}")["spec"]["selector"]["matchLabels"]
        labels = workload_of(other, f"other{workload}")["spec"]["template"]["metadata"]["labels"]
        assert not selector.items() <= labels.items()


# Settings


@pytest.mark.parametrize("case", CASES)
def test_the_service_takes_the_settings_and_listens_on_the_ports(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(rendered(case), monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container_of(rendered(case))["ports"]}
    assert settings.listen[0] == f"0.0.0.0:{ports['grpc']}"
    assert settings.admin_listen == f"0.0.0.0:{ports['admin']}"
    assert settings.device == ("cuda:0" if case in GPU_CASES else "cpu")
    # By default a process starts a thread for every core of its node.
    assert 1 <= settings.ingest_threads * settings.torch_threads <= 64


@pytest.mark.parametrize("case", CASES)
def test_p37_the_pod_has_time_to_drain(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(rendered(case), monkeypatch)
    before_stop_s = container_of(rendered(case))["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = pod_of(rendered(case))["terminationGracePeriodSeconds"]
    assert grace_s >= before_stop_s + LEAVE_S + settings.drain_grace_s + ENGINE_STOP_S + LAST_SPANS_S + 2
    assert before_stop_s >= 5


@pytest.mark.parametrize("case", CASES)
def test_p17_the_memory_limit_covers_what_is_held(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content counts three times: as it arrives, in its message, and as an item."""
    settings = settings_of(rendered(case), monkeypatch)
    limits = container_of(rendered(case))["resources"]["limits"]
    held_bytes = settings.arena_bytes + 3 * settings.max_queued_bytes
    held_bytes += settings.max_undelivered_bytes + settings.max_decoded_bytes
    assert held_bytes + (1 << 30) <= quantity(limits["memory"])
    gpus = {"nvidia.com/gpu": "1"} if case in GPU_CASES else {}
    assert {name: limit for name, limit in limits.items() if name != "memory"} == gpus


@pytest.mark.parametrize("memory", ["5Gi", "2G", "7100Mi", "1000000"])
def test_p50_a_memory_limit_below_what_the_settings_admit_is_refused(memory: str) -> None:
    with pytest.raises(RenderingFailed, match=f"limits.memory is {memory}, .* admit 7168Mi"):
        render({"resources": {"limits": {"memory": memory}}})
    lowered = {
        "VE_MAX_QUEUED_BYTES": "2097152",
        "VE_MAX_MESSAGE_BYTES": "2097152",
        "VE_ARENA_BYTES": "1048576",
    }
    lowered |= {"VE_MAX_DECODED_BYTES": "67108864", "VE_MAX_UNDELIVERED_BYTES": "67108864"}
    render({"resources": {"limits": {"memory": "1280Mi"}}, "settings": lowered})


def test_p50_decoding_threads_follow_the_pods_cores() -> None:
    def threads(resources: Object, settings: Mapping[str, Any] = MappingProxyType({})) -> str:
        return environment_of(render({"resources": resources, "settings": dict(settings)}))[
            "VE_INGEST_THREADS"
        ]

    assert threads({"requests": {"cpu": "3"}}) == "3"
    assert threads({"requests": {"cpu": "3"}, "limits": {"cpu": "4500m"}}) == "5"
    assert threads({"requests": {"cpu": "250m"}}) == "1"
    assert threads({"requests": {"cpu": "3"}}, {"VE_INGEST_THREADS": "7"}) == "7"


def test_settings_reach_the_pod_as_written_and_a_change_rolls_it() -> None:
    given = {"VE_MODEL_NAME": "yes", "VE_URL_ALLOW": 'a,*."b"'}
    objects = render({"settings": given, "env": [{"name": "GRPC_VERBOSITY", "value": "info"}]})
    assert given.items() <= environment_of(objects).items()
    assert environment_of(objects)["GRPC_VERBOSITY"] == "info"

    def annotations(*values: Object) -> Object:
        found: Object = named(render(*values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return found

    tokens = {"enabled": True, "file": "a=1\n", "admin": "9"}
    assert annotations() != annotations({"settings": given})
    assert annotations({"tokens": tokens}) != annotations({"tokens": tokens | {"admin": "8"}})
    assert annotations({"tokens": tokens}) == annotations({"tokens": tokens | {"file": "a=2\n"}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"setings": {}}, "setings"),
        ({"settings": {"ARENA_BYTES": "1"}}, "ARENA_BYTES"),
        ({"pod": {"hostIPC": True}}, "pod"),
        ({"tokens": {"enabled": True}, "settings": {"VE_OPEN_NAMESPACES": "1"}}, "tokens.enabled needs"),
        ({"tls": {"enabled": True}, "settings": {"VE_TLS_CERT": "/x"}}, "tls.enabled needs"),
        ({"tokens": {"enabled": True}, "settings": {"VE_ADMIN_TOKEN": "x"}}, "from the Secret"),
        ({"broker": {"enabled": True}, "settings": {"VE_BROKER_PATH": "/x"}}, "from the pod's name"),
        ({"settings": {"VE_LISTEN": "127.0.0.1:50051"}}, "need 0.0.0.0:50051"),
        ({"settings": {"VE_ADMIN_LISTEN": "0.0.0.0:9000"}}, "need 0.0.0.0:8080"),
        ({"weights": {"source": "hub"}}, "settings.VE_MODEL needs the model's id"),
        ({"tls": {"enabled": True, "key": "K"}}, "tls.certificate is not"),
        ({"tls": {"enabled": True, "key": "K", "certificate": "C", "clientCertificates": True}}, "tls.ca"),
        ({"tls": {"clientCertificates": True}}, "needs tls.enabled"),
        ({"kind": "DaemonSet", "autoscaling": {"kind": "hpa"}}, "autoscaling.kind is hpa"),
        ({"kind": "DaemonSet", "strategy": {"maxUnavailable": 1}}, "has to be 0"),
        ({"gateway": {"enabled": True, "drainSeconds": 36}}, "PeriodSeconds is below 41"),
        ({"gateway": {"pod": {"hostNetwork": True}}}, "gateway.pod"),
        ({"tokens": {"enabled": True, "file": "a=b"}}, "tokens.admin is not"),
        ({"preStopSeconds": 9}, "terminationGracePeriodSeconds is below 41"),
        ({"settings": {"VE_DRAIN_GRACE_S": "30.5"}}, "terminationGracePeriodSeconds is below 48"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused_by_name(values: Object, message: str) -> None:
    with pytest.raises(RenderingFailed, match=re.escape(message)):
        render(values)


def test_secrets_are_made_of_their_values(tmp_path: Path) -> None:
    tls = {"enabled": True, "certificate": "-----BEGIN\nA\n", "key": "K\n", "ca": "C\n"}
    objects = render({"tls": tls, "tokens": {"enabled": True, "file": "a=1234\nb=5678", "admin": "9"}})
    assert named(objects, "Secret", f"{NAME}-tls")["stringData"] == {
        "tls.crt": "-----BEGIN\nA\n",
        "tls.key": "K\n",
        "ca.crt": "C\n",
    }
    (tmp_path / "tokens").write_text(named(objects, "Secret", f"{NAME}-tokens")["stringData"]["tokens"])
    assert NamespaceTokens(tmp_path / "tokens").opens("b", "5678")
    assert not [each for each in rendered("gpu-secured") if each["kind"] == "Secret"]


# The pod


@pytest.mark.parametrize("case", CASES)
def test_security_contexts_are_the_strictest(case: str) -> None:
    for workload in workloads_of(rendered(case)):
        pod = workload["spec"]["template"]["spec"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["runAsGroup"] == 65532
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.keys() & {"hostNetwork", "hostPID", "hostIPC"} == set()
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["resources"]["limits"]["memory"]
            if container["name"] == "socket-folder":
                # Root, for one folder of the node.
                added = container["securityContext"]["capabilities"]
                assert added == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
                assert [mount["name"] for mount in container["volumeMounts"]] == ["broker"]
            else:
                assert container["securityContext"] == RESTRICTED
        is_node_local = "node-local" in CASES[case] and workload["metadata"]["name"] == NAME
        host_paths = [volume["name"] for volume in pod["volumes"] if "hostPath" in volume]
        assert host_paths == (["broker"] if is_node_local else [])


@pytest.mark.parametrize("user", [0, 1000])
def test_encoders_run_as_the_user_of_their_language_models_for_mps(user: int) -> None:
    """The gateway and the group of the broker's socket stay."""
    objects = render({"runAsUser": user}, case="gpu-node-local-gateway")
    validate(objects)
    pod = pod_of(objects)
    assert pod["securityContext"]["runAsUser"] == user
    assert pod["securityContext"]["runAsNonRoot"] is (user != 0)
    (folder,) = [each for each in pod["initContainers"] if each["name"] == "socket-folder"]
    assert f"chown {user}:65532 " in folder["command"][-1]
    assert pod_of(objects, GATEWAY)["securityContext"]["runAsUser"] == 65532


def test_kernel_settings_are_for_the_encoders_alone() -> None:
    """With the option that the documents give."""
    (option,) = re.findall(r"`(--set-json .*?)`", Path("docs/transports.md").read_text())
    line = helm("template", NAME, str(CHART), *files_of("gpu-gateway"), *shlex.split(option))
    objects = [each for each in yaml.safe_load_all(line) if each]
    validate(objects)
    small_buffers = [{"name": "net.ipv4.tcp_wmem", "value": "4096 16384 131072"}]
    assert pod_of(objects)["securityContext"]["sysctls"] == small_buffers
    assert "sysctls" not in pod_of(objects, GATEWAY)["securityContext"]
    with pytest.raises(RenderingFailed, match="sysctls"):
        render({"sysctls": [{"name": "net.ipv4.tcp_wmem"}]})


def test_a_gpu_offers_as_many_parts_as_processes_share_it() -> None:
    """With more, each gets less memory and threads; only labelled nodes share."""
    configs = yaml.safe_load((HELM_FOLDER / "device-plugin-mps.yaml").read_text())["config"]
    found = {name: yaml.safe_load(text) for name, text in configs["map"].items()}
    assert "sharing" not in found[configs["default"]]
    (shared,) = found["mps"]["sharing"]["mps"]["resources"]
    (resource,) = (name for name in container_of(rendered("gpu"))["resources"]["limits"] if "/" in name)
    assert shared == {"name": resource, "replicas": 2}


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_grpc_health_or_with_tls_the_admin_plane(case: str) -> None:
    container = container_of(rendered(case))
    patience_s = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        if "secured" in CASES[case]:
            path = "/healthz" if name == "livenessProbe" else "/readyz"
            assert probe["httpGet"] == {"path": path, "port": "admin"}
        else:
            assert probe["grpc"] == {"port": 50051, "service": SERVICE}
        patience_s[name] = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience_s["startupProbe"] >= (600 if case in GPU_CASES else 120)
    assert patience_s["livenessProbe"] > patience_s["readinessProbe"]


@pytest.mark.parametrize("case", CASES)
def test_every_file_of_a_setting_is_mounted_and_every_volume_is_bounded(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, pod = settings_of(rendered(case), monkeypatch), pod_of(rendered(case))
    mounts = {Path(mount["mountPath"]): mount for mount in container_of(rendered(case))["volumeMounts"]}
    sockets = [address.removeprefix("unix:") for address in settings.listen if address.startswith("unix:")]
    read = [settings.model, settings.tls_cert, settings.tls_key, settings.tokens_file]
    for path in (*read, *sockets, settings.broker_path):
        if path:
            (mount,) = (mounts[folder] for folder in (Path(path), *Path(path).parents) if folder in mounts)
            assert mount.get("readOnly", False) is (path in read)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes.keys()
    for volume in volumes.values():
        assert "emptyDir" not in volume or quantity(volume["emptyDir"]["sizeLimit"]) > 0


# Traffic


@pytest.mark.parametrize("case", CASES)
def test_selectors_take_one_workloads_pods_and_ports_lead_to_the_container(case: str) -> None:
    objects = rendered(case)
    workloads = workloads_of(objects)

    def selected(labels: Object) -> Object:
        (found,) = (each for each in workloads if labels.items() <= labels_of(each).items())
        return found

    for workload in workloads:
        assert selected(workload["spec"]["selector"]["matchLabels"]) is workload
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert selected(spread["labelSelector"]["matchLabels"]) is workload
        # A DaemonSet cannot have one: it has no scale subresource.
        budgets = [
            each
            for each in of_kind(objects, "PodDisruptionBudget")
            if selected(each["spec"]["selector"]["matchLabels"]) is workload
        ]
        assert [each["spec"]["maxUnavailable"] for each in budgets] == [1] * (
            workload["kind"] == "Deployment"
        )
    for service in of_kind(objects, "Service"):
        (container,) = selected(service["spec"]["selector"])["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            if port["name"] == "grpc":
                assert port["appProtocol"] == ("https" if "secured" in CASES[case] else "kubernetes.io/h2c")
        is_local = service["metadata"]["name"] == f"{NAME}-local"
        assert service["spec"].get("clusterIP") == (None if is_local else "None")


@pytest.mark.parametrize("case", CASES)
def test_only_those_who_call_a_pod_reach_it(case: str) -> None:
    """Peers by label of this namespace ("tenant") and of others; those of the values files."""
    objects = rendered(case)
    mine, clients = {"kubernetes.io/metadata.name": "tenant"}, {"vision-encoder/clients": "true"}
    monitoring, other = (
        {"kubernetes.io/metadata.name": "monitoring"},
        {"kubernetes.io/metadata.name": "other"},
    )
    client, reader = {"vision-encoder/client": "true"}, {"vision-encoder/reader": "true"}
    peers: dict[str, tuple[Object, Object]] = {
        "client": (client, mine),
        "client elsewhere": ({}, clients),
        "reader": (client | reader, mine),
        "reader elsewhere": (reader, clients),
        "pod of the namespace": ({}, mine),
        "pod elsewhere": (client | reader, other),
        "monitoring": ({}, monitoring),
    } | {each["metadata"]["name"]: (labels_of(each), mine) for each in workloads_of(objects)}

    def reached(target: str, port: int) -> set[str]:
        labels = labels_of(workload_of(objects, target))
        return {name for name, peer in peers.items() if is_let_in(objects, labels, port, *peer)}

    callers = {"client", "client elsewhere", "reader", "reader elsewhere"}
    admins = {"monitoring"}
    if "cpu-dev" in CASES[case]:
        own = {"client", "reader", "pod of the namespace"} | {
            each["metadata"]["name"] for each in workloads_of(objects)
        }
        callers = admins = own
    if case in GATEWAY_CASES:
        assert reached(GATEWAY, 50051) == callers
        assert reached(GATEWAY, 9902) == admins
        assert reached(GATEWAY, 9901) == set()
        callers = {GATEWAY} | ({"reader", "reader elsewhere"} if "node-local" in CASES[case] else set())
    assert reached(NAME, 50051) == callers
    assert reached(NAME, 8080) == admins


@pytest.mark.parametrize("case", CASES)
def test_pods_call_names_and_a_gateway_its_encoders(case: str) -> None:
    for policy in of_kind(rendered(case), "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        # A rule without peers lets everybody in.
        assert all(rule["from"] for rule in policy["spec"]["ingress"])
        names, *others = policy["spec"]["egress"]
        assert {each["port"] for each in names["ports"]} == {53}
        if policy["metadata"]["name"] == GATEWAY:
            ((peer,),) = (rule["to"] for rule in others)
            encoders = labels_of(workload_of(rendered(case)))
            assert peer["podSelector"]["matchLabels"].items() <= encoders.items()
            assert [each["port"] for rule in others for each in rule["ports"]] == [50051]
        else:
            assert others == []


@pytest.mark.parametrize(
    ("url", "port"),
    [("https://huggingface.co", 443), ("http://mirror.example.com", 80), ("http://mirror.svc:8080", 8080)],
)
def test_the_port_of_the_hub_is_let_out(url: str, port: int) -> None:
    objects = render({"weights": {"source": "hub", "endpoint": url}, "settings": HUB_MODEL})
    assert named(objects, "NetworkPolicy")["spec"]["egress"][-1] == {
        "ports": [{"port": port, "protocol": "TCP"}]
    }


def test_the_encoder_serves_offline_what_its_init_container_fetches() -> None:
    """tests/integration/test_hub.py runs these commands with these variables."""
    objects = render({"weights": {"source": "hub"}, "settings": HUB_MODEL})
    (init,), encoder = pod_of(objects)["initContainers"], container_of(objects)
    assert init["command"] == ["vision-encoder", "download", HUB_MODEL["VE_MODEL"]]
    homes = [
        {entry["name"]: entry.get("value") for entry in container["env"]} for container in (init, encoder)
    ]
    assert homes[0]["HF_HOME"] == homes[1]["HF_HOME"] == "/models"
    assert homes[1]["HF_HUB_OFFLINE"] == "1"
    assert environment_of(objects)["VE_MODEL"] == HUB_MODEL["VE_MODEL"]
    is_read_only = [
        mount.get("readOnly", False)
        for container in (init, encoder)
        for mount in container["volumeMounts"]
        if mount["name"] == "models"
    ]
    assert is_read_only == [False, True]


def test_a_reader_finds_the_encoder_of_its_node_and_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, the group, the labels and the addresses of reader.yaml are the chart's."""
    validate([READER])
    objects, reader = rendered("gpu-node-local-gateway"), READER["spec"]["template"]
    settings = settings_of(objects, monkeypatch)
    paths = set()
    for pod, is_reader in ((pod_of(objects), False), (reader["spec"], True)):
        (container,) = pod["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "broker")
        (volume,) = (each for each in pod["volumes"] if each["name"] == "broker")
        paths.add((mount["mountPath"], volume["hostPath"]["path"], volume["hostPath"]["type"]))
        assert mount.get("readOnly", False) is is_reader
    ((folder, _, kind),) = paths
    assert kind == "DirectoryOrCreate"
    assert (
        pod_of(objects)["securityContext"]["runAsGroup"]
        in reader["spec"]["securityContext"]["supplementalGroups"]
    )
    # Each encoder of a node has its own socket; a pod's name has 57 characters at most, a socket's path 107.
    assert settings.broker_path == f"{folder}/{FROM_ELSEWHERE['POD_NAME']}.sock"
    assert len(f"{folder}/{57 * 'x'}.sock") <= 107
    local, gateway = (named(objects, "Service", f"{NAME}-{which}")["spec"] for which in ("local", "gateway"))
    assert local["internalTrafficPolicy"] == "Local"
    targets = {entry["name"]: entry["value"] for entry in reader["spec"]["containers"][0]["env"]}
    assert [targets["ENCODER_TARGET"], targets["ENCODER_FALLBACK_TARGET"]] == [
        f"{NAME}-local.{NAME}.svc:{local['ports'][0]['port']}",
        f"dns:///{GATEWAY}.{NAME}.svc:{gateway['ports'][0]['port']}",
    ]


def test_encoders_with_a_broker_stand_on_the_nodes_of_readers() -> None:
    """A Deployment's beside readers. A DaemonSet's on labelled nodes: beside no reader its pod would wait."""
    assert "affinity" not in pod_of(rendered("gpu-node-local"))
    assert pod_of(rendered("gpu-node-local"))["nodeSelector"] == {"vision-encoder/node": "true"}
    pod = pod_of(render({"broker": {"enabled": True}}))
    (rule,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = READER["spec"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()


def test_p45_kernel_choices_are_on_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    claim: Object = {"choicesClaim": "choices"}
    objects = render(claim)
    validate(objects)
    folder = settings_of(objects, monkeypatch).choices_dir
    assert folder in {one["mountPath"] for one in container_of(objects)["volumeMounts"]}
    volumes = pod_of(objects)["volumes"]
    (named_claim,) = [one["persistentVolumeClaim"] for one in volumes if one["name"] == "choices"]
    assert named_claim == {"claimName": "choices"}
    with pytest.raises(RenderingFailed, match="choicesClaim"):
        render(claim, {"settings": {"VE_CHOICES_DIR": "/elsewhere"}})
