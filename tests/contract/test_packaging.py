"""The wheels: what is in them, what they need, and that what is in them imports.

Built without isolation and without the network.
"""

from __future__ import annotations

import email.message
import email.parser
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import encoder_service

ROOT = Path(__file__).parents[2]


def build_wheel(project: Path, out: Path) -> Path:
    """The wheel of a project of this repository."""
    completed = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def service_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def adapter_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT / "lm_adapter", tmp_path_factory.mktemp("adapter"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def base_requirements(wheel: Path) -> dict[str, Requirement]:
    """Requirements that hold without any extra."""
    requirements = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    return {
        requirement.name: requirement
        for requirement in requirements
        if requirement.marker is None or "extra" not in str(requirement.marker)
    }


def tracked(folder: str) -> set[str]:
    """Python and typing files of a package, as they lie in the source tree."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".proto"} or path.name == "py.typed"
    }


def test_service_wheel_has_every_module_of_the_three_packages(service_wheel: Path) -> None:
    names = names_in(service_wheel)
    expected = tracked("encoder_service") | tracked("lm_adapter")
    expected |= {name.removeprefix("proto/") for name in tracked("proto/vision_encoder")}
    assert expected <= names
    for package in ("encoder_service", "lm_adapter", "vision_encoder"):
        assert f"{package}/py.typed" in names
    for name in ("encoder.proto", "encoder_pb2.py", "encoder_pb2.pyi", "encoder_pb2_grpc.pyi"):
        assert f"vision_encoder/v1/{name}" in names


def test_service_wheel_has_every_file_of_the_admin_page(service_wheel: Path) -> None:
    static = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "encoder_service").rglob("*")
        if path.is_file() and path.suffix in {".html", ".css", ".js", ".svg", ".json"}
    }
    assert static <= names_in(service_wheel)


def test_service_wheel_has_nothing_else(service_wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(service_wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "encoder_service",
        "lm_adapter",
        "vision_encoder",
    }
    assert not [name for name in names_in(service_wheel) if "__pycache__" in name or name.endswith(".toml")]


def test_service_metadata(service_wheel: Path) -> None:
    metadata = metadata_of(service_wheel)
    assert metadata["Name"] == "vision-encoder"
    assert metadata["Version"] == encoder_service.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    with zipfile.ZipFile(service_wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "vision-encoder = encoder_service.cli:main" in archive.read(entry_points).decode()
        (license_file,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(license_file).decode() == (ROOT / "LICENSE").read_text()


def test_torch_is_a_range_that_keeps_an_installed_or_local_build(service_wheel: Path) -> None:
    torch = base_requirements(service_wheel)["torch"]
    assert torch.url is None
    for version in ("2.9.0", "2.11.0+cu130", "2.13.0+cpu", "2.13.1"):
        assert torch.specifier.contains(Version(version)), version
    for version in ("2.8.0", "2.14.0", "3.0"):
        assert not torch.specifier.contains(Version(version)), version


def test_no_gpu_package_is_needed_by_default(service_wheel: Path) -> None:
    names = base_requirements(service_wheel).keys()
    gpu_words = ("nvidia", "cuda", "triton", "flash", "fa3", "cupy", "transformers", "torchvision")
    assert [name for name in names if any(word in name for word in gpu_words)] == []


def test_every_extra_is_offered(service_wheel: Path) -> None:
    extras = set(metadata_of(service_wheel).get_all("Provides-Extra", []))
    assert extras == {
        "adapter",
        "cuda",
        "dev",
        "engines",
        "fa3",
        "fa4",
        "flash-attn",
        "hf",
        "otel",
        "shared",
        "uvloop",
        "vllm",
    }


def test_adapter_wheel_is_the_adapter_and_the_contract_alone(adapter_wheel: Path) -> None:
    names = names_in(adapter_wheel)
    expected = tracked("lm_adapter")
    expected |= {name.removeprefix("proto/") for name in tracked("proto/vision_encoder")}
    assert expected <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "lm_adapter",
        "vision_encoder",
    }
    assert base_requirements(adapter_wheel).keys() == {"grpcio", "numpy", "protobuf"}
    assert metadata_of(adapter_wheel)["Version"] == encoder_service.__version__


@pytest.mark.parametrize(
    ("wheel", "imports"),
    [
        ("service_wheel", "encoder_service.cli, lm_adapter, vision_encoder.v1.encoder_pb2_grpc"),
        ("adapter_wheel", "lm_adapter, vision_encoder.v1.encoder_pb2_grpc"),
    ],
)
def test_an_unpacked_wheel_imports(
    wheel: str, imports: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with zipfile.ZipFile(request.getfixturevalue(wheel)) as archive:
        archive.extractall(tmp_path)
    code = f"import {imports}; print(lm_adapter.__file__)"
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == str(tmp_path / "lm_adapter" / "__init__.py")


def test_the_adapters_requirements_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    adapter = tomllib.loads((ROOT / "lm_adapter" / "pyproject.toml").read_text())["project"]
    assert adapter["dependencies"] == project["optional-dependencies"]["adapter"]
    assert adapter["requires-python"] == project["requires-python"]
