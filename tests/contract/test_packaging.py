"""The distribution: wheel and source archive built from each other, installed, and what environments need.
Without the network."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import encoder_service

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
KEPT = {".py", ".pyi", ".proto", ".typed", ".html", ".css", ".js", ".svg", ".json", ".jinja"}
ENGINE_PINS = sorted((ROOT / "tests" / "contract" / "engine_pins").glob("*.txt"))


def run(*command: str | Path, status: int = 0) -> str:
    """The output of a command, both streams. It has to end with this status."""
    ended = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout
    return ended.stdout


def build(project: Path, out: Path, *kinds: str) -> Path:
    """The last archive that is built. Without a kind: the source archive, and from it the wheel."""
    run(sys.executable, "-m", "build", *kinds, "--no-isolation", "--outdir", out, project)
    (built,) = out.glob("*.tar.gz" if kinds == ("--sdist",) else "*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive that lies beside it."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(wheel: Path) -> Path:
    (archive,) = wheel.parent.glob("*.tar.gz")
    return archive


def content_of(archive: Path) -> dict[str, bytes]:
    """Files by name; of a source archive without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = {member.name.partition("/")[2]: sdist.extractfile(member) for member in sdist.getmembers()}
        return {name: file.read() for name, file in members.items() if file is not None}


def metadata_of(wheel: Path) -> email.message.Message:
    (text,) = (text for name, text in content_of(wheel).items() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(text.decode())


def files_of(*folders: str) -> set[str]:
    """Files of packages in the source tree, as a wheel names them."""
    return {
        str(path.relative_to(ROOT)).removeprefix("proto/")
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and (path.suffix in KEPT or path.name == "py.typed")
    }


def names_of(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


# -- the archives --------------------------------------------------------------------------------------


def test_the_wheel_is_its_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in content_of(wheel) if ".dist-info/" not in name}
    assert names == files_of("encoder_service", "lm_adapter", "proto/vision_encoder")
    assert {f"{name}/py.typed" for name in ("encoder_service", "lm_adapter", "vision_encoder")} <= names


def test_checkout_and_source_archive_give_the_same_archives(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    assert content_of(build(ROOT, tmp_path / "wheel", "--wheel")) == content_of(wheel)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert content_of(build(unpacked, tmp_path / "sdist", "--sdist")) == content_of(sdist)


def test_both_carry_licence_readme_and_where_the_project_is(wheel: Path, sdist: Path) -> None:
    licence, readme = (ROOT / "LICENSE").read_bytes(), (ROOT / "README.md").read_text()
    source, metadata = content_of(sdist), metadata_of(wheel)
    assert source["LICENSE"] == licence
    assert source["README.md"].decode() == readme
    assert licence in [text for name, text in content_of(wheel).items() if name.endswith("/LICENSE")]
    assert metadata.get_payload().rstrip() == readme.rstrip()  # type: ignore[union-attr]
    assert metadata["Version"] == encoder_service.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "the vision-encoder contributors"
    (homepage,) = (url.partition(", ")[2] for url in metadata.get_all("Project-URL", []))
    for name in ("mkdocs.yml", ".github/ISSUE_TEMPLATE/config.yml"):
        assert re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text()) == [homepage]
    versions = [text for text in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", text)]
    assert [text.rpartition(" ")[2] for text in versions] == ["3.11", "3.12", "3.13"]


# -- installed -----------------------------------------------------------------------------------------


def installed(archive: Path, environment: Path) -> Path:
    """The folder of programs of a new environment in which the archive is installed, without its
    requirements."""
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Requirements lie beside the archive's content, which comes first.
    if archive.suffix == ".whl":
        for name in with_requirements(PROJECT["dependencies"]):
            for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {".."}:
                (site / top).symlink_to(str(importlib.metadata.distribution(name).locate_file(top)))
    else:
        (site / "requirements.pth").write_text(str(importlib.metadata.distribution("pip").locate_file("")))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps")
    run(*pip, "--no-build-isolation", archive)
    return python.parent


def with_requirements(requirements: Iterable[str]) -> set[str]:
    """The distributions and all that they require, without extras."""
    names = names_of(requirements)
    for name in list(names):
        needed = map(Requirement, importlib.metadata.requires(name) or ())
        names |= with_requirements(
            str(each) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
        )
    return names


@pytest.fixture(scope="module")
def thin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pip install .``: the wheel and its base."""
    return installed(wheel, tmp_path_factory.mktemp("thin"))


CLIENT = """
import os, sys
os.environ["GRPC_VERBOSITY"] = "error"  # of the other end's goodbye
from importlib.metadata import entry_points
from lm_adapter import ImageItem, MissingDependency, VisionEncoderClient
from lm_adapter.testing import FakeEncoder
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    rows = client.encode(ImageItem(b"x"))
    print(rows.num_rows > 0, "torch" in sys.modules)
for call in (lambda: ImageItem.from_array(rows.numpy()), rows.torch):
    try:
        call()
    except MissingDependency as error:
        print(error)
(plugin,) = entry_points(group="vllm.general_plugins")
print(plugin.name, callable(plugin.load()))
"""


def test_a_thin_install_is_a_client_and_an_engines_plugin(thin: Path) -> None:
    assert run(thin / "python", "-I", "-c", CLIENT).splitlines() == [
        "True False",
        "an image from pixels needs the package pillow, which is not installed",
        "EncodedRows.torch() needs the package torch, which is not installed",
        "vision_encoder True",
    ]


@pytest.mark.parametrize("command", ["info", "serve", "--help"])
def test_a_thin_install_says_what_the_commands_need(command: str, thin: Path) -> None:
    answer = run(thin / "vision-encoder", command, status=1)
    assert answer == (
        "vision-encoder: the module typer is not installed; the commands and the service need the extra "
        "serve: pip install '.[serve]' in a checkout\n"
    )


def test_a_service_says_which_of_its_packages_is_missing(thin: Path) -> None:
    """In an engine's environment the command line's own packages are often there."""
    code = """
import sys
from encoder_service import __main__
sys.modules.update(dict.fromkeys(["structlog"]))  # None: not there
sys.argv[1:] = ["serve", "--model", "x"]
__main__.main()
"""
    assert "the module structlog is not installed" in run(sys.executable, "-c", code, status=1)


def test_an_installed_source_archive_has_the_commands(sdist: Path, tmp_path: Path) -> None:
    assert "--model" in run(installed(sdist, tmp_path) / "vision-encoder", "serve", "--help")


# -- requirements --------------------------------------------------------------------------------------


def test_requirements() -> None:
    assert names_of(PROJECT["dependencies"]) == {"blake3", "grpcio", "numpy", "protobuf"}
    gpu_words = ("nvidia", "cuda", "triton", "flash", "fa3", "cupy", "transformers", "torchvision")
    assert not [name for name in names_of(EXTRAS["serve"]) if any(word in name for word in gpu_words)]
    (torch,) = (Requirement(text) for text in EXTRAS["serve"] if Requirement(text).name == "torch")
    assert [each.operator for each in torch.specifier] == [">="]


@pytest.mark.parametrize("pins", ENGINE_PINS, ids=lambda path: path.stem)
def test_p61_an_engines_extra_leaves_its_environment_as_it_is(pins: Path) -> None:
    """What the engine has satisfies all that the adapter needs, and the adapter names no torch."""
    engine = pins.stem.partition("-")[0]
    present: Mapping[str, str] = dict(
        line.split("==") for line in pins.read_text().splitlines() if not line.startswith("#")
    )
    needed = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS[engine], *EXTRAS["cuda"])]
    assert "torch" not in {each.name for each in needed}
    assert "torch" in present
    for each in needed:
        version = present.get(canonicalize_name(each.name))
        assert version is None or each.specifier.contains(version, prereleases=True), f"{each}: {version}"


def test_documents_and_messages_install_what_exists_from_a_checkout() -> None:
    """No release is published: a distribution's name installs nothing, or another's."""
    tracked = run("git", "-C", ROOT, "ls-files", "*.md", "*.py", "*.yaml", "*.yml", "*.Dockerfile").split()
    texts = {
        name: (ROOT / name).read_text() for name in tracked if name != "tests/contract/test_packaging.py"
    }
    commands = [
        (name, command) for name, text in texts.items() for command in re.findall(r"pip install[^`\n]*", text)
    ]
    assert {"README.md", "docs/vllm.md", "encoder_service/errors.py"} <= {name for name, _ in commands}
    for name, command in commands:
        assert "vision-encoder" not in command, f"{name}: {command}"
        for extras in re.findall(r"\.\[([^\]]*)\]", command):
            assert set(extras.split(",")) <= set(EXTRAS), f"{name}: {command}"
