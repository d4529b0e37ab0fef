"""The images and the Kubernetes base, checked offline against the schemas, the settings and each other."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

import encoder_service
from encoder_service.config import Settings, parse_settings

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
BASE = ROOT / "deploy" / "k8s" / "base"
KUBERNETES_VERSIONS = ("1.30", "1.33")
QUANTITY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Object = dict[str, Any]


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) in order, continuation lines joined, comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name.upper(), arguments.strip()) for name, _, arguments in pairs]


def arguments_of(dockerfile: Path, name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions(dockerfile) if instruction == name]


def final_stage(dockerfile: Path) -> list[tuple[str, str]]:
    """Instructions after the last FROM."""
    found = instructions(dockerfile)
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[start + 1 :]


def environment_of(dockerfile: Path) -> dict[str, str]:
    """What the final stage's ENV sets."""
    pairs = [pair for name, text in final_stage(dockerfile) if name == "ENV" for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)


def settings_from(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that a process with these VE_ variables would have; every one of them is a setting."""
    names = {f"VE_{field.upper()}" for field in Settings.model_fields}
    given = {name: value for name, value in environment.items() if name.startswith("VE_")}
    assert given.keys() <= names, given.keys() - names
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return parse_settings()


def load(name: str) -> Object:
    document: Object = yaml.safe_load((BASE / name).read_text())
    return document


@pytest.fixture(scope="module")
def deployment() -> Object:
    return load("deployment.yaml")


@pytest.fixture(scope="module")
def pod(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: Object) -> Object:
    (only,) = pod["containers"]
    found: Object = only
    return found


def environment(container: Object) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def quantity_bytes(text: str) -> int:
    return int(text[:-2]) * QUANTITY[text[-2:]]


# Images


def test_both_images_are_here() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_bases_are_pinned_to_a_patch_release(self, dockerfile: Path) -> None:
        bases = arguments_of(dockerfile, "FROM")
        assert len(bases) >= 2, "build tools stay out of the final image"
        for base in bases:
            image = base.split()[0]
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", image), image
        assert len({base.split()[0] for base in bases}) == 1, "the virtual environment moves between them"

    def test_every_copied_source_exists_and_is_sent_to_the_builder(self, dockerfile: Path) -> None:
        sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
        for arguments in arguments_of(dockerfile, "COPY"):
            *sources, _target = shlex.split(arguments)
            if sources[0].startswith("--from="):
                stage = sources[0].removeprefix("--from=")
                assert f" AS {stage}" in " ".join(arguments_of(dockerfile, "FROM"))
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), f"{source} is ignored"

    def test_everything_the_wheel_is_built_from_is_copied(self, dockerfile: Path) -> None:
        copied = {source for text in arguments_of(dockerfile, "COPY") for source in shlex.split(text)[:-1]}
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        needed = {package.split("/")[0] for package in packages}
        needed |= {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
        assert needed <= copied

    def test_torch_is_pinned_within_the_projects_range(self, dockerfile: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (allowed,) = (text for text in project["dependencies"] if text.startswith("torch"))
        installs = [text for text in arguments_of(dockerfile, "RUN") if "torch==" in text]
        (pin,) = re.findall(r"torch==([\d.]+)", " ".join(installs))
        assert Requirement(allowed).specifier.contains(pin)
        assert ("/whl/cpu" in installs[0]) == (dockerfile.name == "cpu.Dockerfile")

    def test_runs_as_a_numeric_user_without_rights(self, dockerfile: Path) -> None:
        users = [arguments for name, arguments in final_stage(dockerfile) if name == "USER"]
        assert users == ["65532:65532"]
        names = [name for name, _ in final_stage(dockerfile)]
        assert "RUN" not in names[names.index("USER") :]

    def test_writes_only_under_tmp_and_run(self, dockerfile: Path) -> None:
        variables = environment_of(dockerfile)
        assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
        assert variables["HOME"] == "/tmp"
        assert variables.get("TRITON_CACHE_DIR", "/tmp/triton").startswith("/tmp/")

    def test_settings_are_valid_and_match_the_exposed_ports(
        self, dockerfile: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = settings_from(environment_of(dockerfile), monkeypatch)
        assert str(settings.model) == "/models"
        assert settings.device == ("cpu" if dockerfile.name == "cpu.Dockerfile" else "cuda:0")
        (exposed,) = arguments_of(dockerfile, "EXPOSE")
        addresses = [*settings.listen, settings.admin_listen]
        assert exposed.split() == [address.rpartition(":")[2] for address in addresses]
        assert all(address.startswith("0.0.0.0:") for address in addresses)

    def test_health_check_probes_the_grpc_port(
        self, dockerfile: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (check,) = arguments_of(dockerfile, "HEALTHCHECK")
        command = yaml.safe_load(check[check.index("[") :])
        assert command[:3] == ["vision-encoder", "health", "--server"]
        port = settings_from(environment_of(dockerfile), monkeypatch).listen[0].rpartition(":")[2]
        assert command[3] == f"127.0.0.1:{port}"
        assert set(command_options("health")) >= {"--server"}

    def test_entry_point_is_the_serve_command(self, dockerfile: Path) -> None:
        (entry,) = arguments_of(dockerfile, "ENTRYPOINT")
        assert yaml.safe_load(entry) == ["vision-encoder", "serve"]
        assert arguments_of(dockerfile, "STOPSIGNAL") == ["SIGTERM"]
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert scripts.keys() == {"vision-encoder"}
        wanted = {"--model", "--device", "--dtype", "--listen", "--admin-listen"}
        assert wanted <= set(command_options("serve"))


def command_options(command: str) -> list[str]:
    """Option strings of one command of ``vision-encoder``."""
    import typer.main

    from encoder_service.cli import app

    group: Any = typer.main.get_command(app)
    return [option for parameter in group.commands[command].params for option in parameter.opts]


# Kubernetes


def test_kustomization_lists_exactly_the_files() -> None:
    kustomization = load("kustomization.yaml")
    files = {path.name for path in BASE.iterdir()} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    assert len(kustomization["resources"]) == len(files)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", load("kustomization.yaml")["resources"])
def test_manifest_fits_the_schema(name: str, version: str) -> None:
    document = load(name)
    assert document["metadata"]["name"] == "vision-encoder"
    kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_check_notices_a_misspelt_field() -> None:
    document = load("deployment.yaml")
    document["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodSecond"):
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_kustomize_builds_every_object() -> None:
    completed = subprocess.run(
        ["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, timeout=60, check=True
    )
    built = {document["kind"] for document in yaml.safe_load_all(completed.stdout)}
    assert built == {"Deployment", "Service", "ServiceAccount"}


def test_selectors_match_the_pods(deployment: Object) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert load("service.yaml")["spec"]["selector"].items() <= labels.items()


def test_service_is_headless_and_its_ports_are_the_containers(container: Object) -> None:
    service = load("service.yaml")["spec"]
    assert service["clusterIP"] == "None"
    container_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == container_ports
    assert container_ports.keys() == {"grpc", "admin"}


def test_settings_are_valid_and_match_the_ports(container: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(container)
    assert all(name.startswith("VE_") for name in variables)
    settings = settings_from(variables, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.listen == (f"0.0.0.0:{ports['grpc']}", "unix:/run/vision-encoder/encoder.sock")
    assert settings.admin_listen == f"0.0.0.0:{ports['admin']}"


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probe_asks_the_grpc_health_service(container: Object, probe: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert container[probe]["grpc"] == {"port": ports["grpc"]}
    assert container[probe]["timeoutSeconds"] <= container[probe]["periodSeconds"]


def test_a_pod_has_minutes_to_start_and_is_not_restarted_sooner_than_unready(container: Object) -> None:
    def patience_s(probe: str) -> int:
        seconds: int = container[probe]["periodSeconds"] * container[probe]["failureThreshold"]
        return seconds

    assert patience_s("startupProbe") >= 120
    assert patience_s("livenessProbe") > patience_s("readinessProbe")


def test_p37_the_pod_has_time_to_drain(
    pod: Object, container: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_from(environment(container), monkeypatch)
    before_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before_stop_s + settings.drain_grace_s + 5


def test_security_contexts_are_the_strictest(pod: Object, container: Object) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for dockerfile in DOCKERFILES:
        assert arguments_of(dockerfile, "USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    forbidden = {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}
    assert pod.keys() & forbidden == set()


def test_no_pod_talks_to_the_cluster(pod: Object) -> None:
    account = load("serviceaccount.yaml")
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is False
    assert account["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_every_mount_has_its_volume_and_what_is_written_is_bounded(
    pod: Object, container: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    settings = settings_from(environment(container), monkeypatch)
    assert mounts["models"] == {"name": "models", "mountPath": str(settings.model), "readOnly": True}
    assert volumes["models"]["persistentVolumeClaim"]["readOnly"] is True
    sockets = [address.removeprefix("unix:") for address in settings.listen if address.startswith("unix:")]
    assert [str(Path(socket).parent) for socket in sockets] == [mounts["run"]["mountPath"]]
    for name in volumes.keys() - {"models"}:
        assert quantity_bytes(volumes[name]["emptyDir"]["sizeLimit"]) > 0


def test_p17_memory_limit_covers_the_store_and_the_queue(
    container: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both together take at most half of the limit; weights, activations and libraries have the rest."""
    settings = settings_from(environment(container), monkeypatch)
    limit_bytes = quantity_bytes(container["resources"]["limits"]["memory"])
    assert 2 * (settings.store_bytes + settings.max_queued_bytes) <= limit_bytes
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_image_carries_the_projects_version(container: Object) -> None:
    version = encoder_service.__version__
    assert container["image"] == f"vision-encoder:{version}-cpu"
    for dockerfile in DOCKERFILES:
        variant = dockerfile.name.removesuffix(".Dockerfile")
        assert f"-t vision-encoder:{version}-{variant} ." in dockerfile.read_text()
