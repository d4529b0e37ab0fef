"""The images, checked offline against the settings, the package and each other. Manifests: tests/deploy."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import encoder_service
from encoder_service.config import Settings, parse_settings

ROOT = Path(__file__).parents[2]
# Beside this interpreter, where the development dependencies put it, or anywhere.
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


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


# Images


def test_both_images_are_here() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_bases_are_pinned_to_a_patch_release(self, dockerfile: Path) -> None:
        bases = arguments_of(dockerfile, "FROM")
        assert len(bases) >= 2, "build tools stay out of the final image"
        images = [base.split()[0] for base in bases if base.split()[0] != "packages"]
        for image in images:
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", image), image
        assert len(set(images)) == 1, "the virtual environment moves between them"

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

    def test_the_extras_are_the_projects_and_all_that_the_manifests_need(self, dockerfile: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (command,) = (text for text in arguments_of(dockerfile, "RUN") if text.startswith("python -c "))
        (named,) = re.findall(r"'([\w,-]+)'\.split\(", command)
        extras = set(named.split(","))
        assert extras <= project["optional-dependencies"].keys()
        # VE_SHARED_URL, VE_TRACES=otlp; a device arena and the fast path's packages on a GPU.
        on_a_gpu = {"cuda", "fa4"} if dockerfile.name == "cuda.Dockerfile" else set()
        assert extras == {"otel", "shared"} | on_a_gpu
        # What it prints is what pip is given.
        program = shlex.split(command)[2]
        printed = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        needs = [*project["dependencies"]]
        for extra in named.split(","):
            needs += project["optional-dependencies"][extra]
        assert printed.splitlines() == needs
        assert "> needs.txt" in command
        assert "pip install --no-cache-dir -r needs.txt" in command

    def test_a_change_of_code_changes_a_small_layer_alone(self, dockerfile: Path) -> None:
        """The environment's stage takes nothing of the project but its requirements, so that its layer, of
        gigabytes, is the same from release to release and nodes have it already."""
        found = instructions(dockerfile)
        start = [text for name, text in found if name == "FROM"]
        assert [text.partition(" AS ")[2] for text in start] == ["packages", "project", ""]
        stage = found[1 : found.index(("FROM", start[1]))]
        assert [text for name, text in stage if name == "COPY"] == ["pyproject.toml ./"]
        copied = [text for name, text in final_stage(dockerfile) if name == "COPY"]
        assert copied == [
            "--from=packages /opt/venv /opt/venv", "--from=project /opt/project /opt/project"
        ]  # fmt: skip
        (install,) = (text for name, text in found if name == "RUN" and "--target /opt/project" in text)
        assert "--no-deps" in install
        # How the environment finds it, and the shell.
        assert any("echo /opt/project > /opt/venv/lib/python" in text for name, text in stage)
        path = environment_of(dockerfile)["PATH"].split(":")
        assert path[:2] == ["/opt/project/bin", "/opt/venv/bin"]

    def test_nothing_can_be_installed_into_the_final_image(self, dockerfile: Path) -> None:
        last = [text for text in arguments_of(dockerfile, "RUN") if "pip uninstall" in text]
        assert len(last) == 1
        assert last[0].endswith("&& pip uninstall -y pip")
        # What is left out lies where the base image's Python has its packages.
        (base, *_) = arguments_of(dockerfile, "FROM")
        (version,) = re.findall(r"python:(\d+\.\d+)\.", base.split()[0])
        removed = re.findall(r"/opt/venv/\S+/torch/\S+", last[0])
        assert removed
        assert all(path.startswith(f"/opt/venv/lib/python{version}/site-packages/torch/") for path in removed)
        # The base image has one of its own.
        (final,) = (text for name, text in final_stage(dockerfile) if "/usr/local/bin/pip*" in text)
        assert f"/usr/local/lib/python{version}/site-packages/pip*" in final
        assert not [text for name, text in final_stage(dockerfile) if name == "RUN" and "pip " in text]

    def test_the_label_and_the_build_line_carry_the_projects_version(self, dockerfile: Path) -> None:
        version = encoder_service.__version__
        labels = [
            pair for name, text in final_stage(dockerfile) if name == "LABEL" for pair in shlex.split(text)
        ]
        assert f"org.opencontainers.image.version={version}" in labels
        variant = dockerfile.name.removesuffix(".Dockerfile")
        assert f"-t vision-encoder:{version}-{variant} ." in dockerfile.read_text()

    @pytest.mark.skipif(HADOLINT is None, reason="hadolint is neither installed nor on PATH")
    def test_hadolint_finds_nothing(self, dockerfile: Path) -> None:
        ended = subprocess.run(
            # Versions of the distribution's compiler are the pinned base image's; what pip installs beside
            # torch is this folder, whose pyproject.toml has the bounds.
            [str(HADOLINT), "--no-color", "--ignore=DL3008", "--ignore=DL3013", str(dockerfile)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout

    def test_runs_as_a_numeric_user_without_rights(self, dockerfile: Path) -> None:
        users = [arguments for name, arguments in final_stage(dockerfile) if name == "USER"]
        assert users == ["65532:65532"]
        names = [name for name, _ in final_stage(dockerfile)]
        assert "RUN" not in names[names.index("USER") :]

    def test_writes_only_under_tmp_and_run(self, dockerfile: Path) -> None:
        variables = environment_of(dockerfile)
        assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
        assert variables["HOME"] == "/tmp"
        caches = [value for name, value in variables.items() if name.endswith("_CACHE_DIR")]
        assert all(value.startswith("/tmp/") for value in caches)
        # getpass.getuser() fails for a number without a name: quack and flash-attn ask for where caches are.
        assert variables["USER"]

    def test_no_gpu_is_shown_to_who_asked_for_none(self, dockerfile: Path) -> None:
        """The device plugin says it for containers with a limit of GPUs; an image that says "all" shows them
        to the others too, the init containers among them."""
        assert "NVIDIA_VISIBLE_DEVICES" not in environment_of(dockerfile)

    def test_settings_are_valid_and_match_the_exposed_ports(
        self, dockerfile: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = settings_from(environment_of(dockerfile), monkeypatch)
        assert str(settings.model) == "/models"
        assert settings.device == ("cpu" if dockerfile.name == "cpu.Dockerfile" else "cuda:0")
        # 0 is one for each core, in every thread that decodes; on a CPU the tower wants them.
        assert settings.torch_threads == (0 if settings.device == "cpu" else 1)
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
