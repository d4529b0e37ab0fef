"""The container images, checked without a builder against the package, the settings and the commands."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from encoder_service import __version__
from encoder_service.config import parse_settings
from tests.programs import program

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
of_the_service = pytest.mark.parametrize(
    "dockerfile", [path for path in DOCKERFILES if path.stem != "vllm"], ids=lambda path: path.stem
)


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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    # Versions of the distribution's compiler are the pinned base image's; pyproject.toml bounds the packages.
    command = [program("hadolint"), "--no-color", "--ignore=DL3008", "--ignore=DL3013", str(dockerfile)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout


@of_the_service
def test_torch_is_of_the_projects_range_and_built_for_the_image(dockerfile: Path) -> None:
    (allowed,) = (
        text for text in PROJECT["project"]["optional-dependencies"]["serve"] if text.startswith("torch")
    )
    (install,) = (text for text in arguments_of(dockerfile, "RUN") if "torch==" in text)
    (pin,) = re.findall(r"torch==([\d.]+)", install)
    assert Requirement(allowed).specifier.contains(pin)
    assert ("/whl/cpu" in install) == (dockerfile.name == "cpu.Dockerfile")


@of_the_service
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


@of_the_service
def test_label_and_commands_have_the_projects_version(dockerfile: Path) -> None:
    label = dict(
        pair.split("=", 1) for text in arguments_of(dockerfile, "LABEL") for pair in shlex.split(text)
    )
    assert label["org.opencontainers.image.version"] == __version__
    for document in (dockerfile, *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"vision-encoder:(\d[\d.]*)-", document.read_text()))
        assert named <= {__version__}, document.name


@of_the_service
def test_settings_and_ports_are_the_services(dockerfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(dockerfile).items():
        if name.startswith("VE_"):
            monkeypatch.setenv(name, value)
    settings = parse_settings()
    assert settings.device == ("cpu" if dockerfile.name == "cpu.Dockerfile" else "cuda:0")
    (exposed,) = arguments_of(dockerfile, "EXPOSE")
    addresses = [*settings.listen, settings.admin_listen]
    assert addresses == [f"0.0.0.0:{port}" for port in exposed.split()]
