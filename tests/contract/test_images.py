"""The container images, checked without a builder against the package, the settings and the commands."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement

import encoder_service
from encoder_service.cli import app
from encoder_service.config import parse_settings
from tests.programs import program

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
pytestmark = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) in order, continuation lines joined, comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name.upper(), arguments.strip()) for name, _, arguments in pairs]


def arguments_of(dockerfile: Path, name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions(dockerfile) if instruction == name]


def final_stage(dockerfile: Path) -> list[tuple[str, str]]:
    found = instructions(dockerfile)
    return found[max(index for index, (name, _) in enumerate(found) if name == "FROM") + 1 :]


def environment_of(dockerfile: Path) -> dict[str, str]:
    """Variables of the final stage."""
    pairs = [pair for name, text in final_stage(dockerfile) if name == "ENV" for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    # Versions of the distribution's compiler are the pinned base image's; pyproject.toml bounds the packages.
    command = [program("hadolint"), "--no-color", "--ignore=DL3008", "--ignore=DL3013", str(dockerfile)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout


def test_versions_are_pinned_and_the_projects(dockerfile: Path) -> None:
    bases = [base.split()[0] for base in arguments_of(dockerfile, "FROM")]
    images = {base for base in bases if base != "packages"}
    assert len(images) == 1, "the virtual environment moves between them"
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", *images)
    (allowed,) = (text for text in PROJECT["project"]["dependencies"] if text.startswith("torch"))
    (install,) = (text for text in arguments_of(dockerfile, "RUN") if "torch==" in text)
    (pin,) = re.findall(r"torch==([\d.]+)", install)
    assert Requirement(allowed).specifier.contains(pin)
    assert ("/whl/cpu" in install) == (dockerfile.name == "cpu.Dockerfile")
    version = encoder_service.__version__
    assert f'org.opencontainers.image.version="{version}"' in dockerfile.read_text()
    assert (
        f"-t vision-encoder:{version}-{dockerfile.name.removesuffix('.Dockerfile')} ."
        in dockerfile.read_text()
    )


def test_everything_the_wheel_needs_is_copied_and_sent_to_the_builder(dockerfile: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    copies = [shlex.split(text)[:-1] for text in arguments_of(dockerfile, "COPY") if "--from=" not in text]
    copied = {source for sources in copies for source in sources}
    needed = {
        package.split("/")[0] for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    needed |= {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert needed <= copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), f"{source} is ignored"


def test_it_runs_without_rights_and_writes_under_tmp_and_run_only(dockerfile: Path) -> None:
    names = [name for name, _ in final_stage(dockerfile)]
    assert [text for name, text in final_stage(dockerfile) if name == "USER"] == ["65532:65532"]
    assert "RUN" not in names[names.index("USER") :]
    variables = environment_of(dockerfile)
    assert variables["HOME"] == "/tmp"
    assert all(value.startswith("/tmp/") for name, value in variables.items() if name.endswith("_CACHE_DIR"))
    # getpass.getuser() fails for a user without a name; flash-attn asks it for its cache.
    assert variables["USER"]
    # "all" would show every GPU of a node to init containers too.
    assert "NVIDIA_VISIBLE_DEVICES" not in variables


def test_settings_ports_and_commands_are_the_services(
    dockerfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(dockerfile).items():
        if name.startswith("VE_"):
            monkeypatch.setenv(name, value)
    settings = parse_settings()
    assert settings.device == ("cpu" if dockerfile.name == "cpu.Dockerfile" else "cuda:0")
    (exposed,) = arguments_of(dockerfile, "EXPOSE")
    addresses = [*settings.listen, settings.admin_listen]
    assert addresses == [f"0.0.0.0:{port}" for port in exposed.split()]
    (check,) = arguments_of(dockerfile, "HEALTHCHECK")
    health = yaml.safe_load(check[check.index("[") :])
    assert health == ["vision-encoder", "health", "--server", f"127.0.0.1:{exposed.split()[0]}"]
    (entry,) = arguments_of(dockerfile, "ENTRYPOINT")
    assert yaml.safe_load(entry) == ["vision-encoder", "serve"]
    assert arguments_of(dockerfile, "STOPSIGNAL") == ["SIGTERM"]
    group: Any = typer.main.get_command(app)
    assert "--server" in [
        option for parameter in group.commands["health"].params for option in parameter.opts
    ]
