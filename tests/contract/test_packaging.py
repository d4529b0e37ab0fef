"""The wheels: their content, their requirements, and that they import. Built without the network."""

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

import encoder_service

ROOT = Path(__file__).parents[2]
KEPT = {".py", ".pyi", ".proto", ".typed", ".html", ".css", ".js", ".svg", ".json", ".jinja"}


def build_wheel(project: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    projects = {"service": ROOT, "adapter": ROOT / "lm_adapter"}
    return {name: build_wheel(path, tmp_path_factory.mktemp(name)) for name, path in projects.items()}


def content_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def requirements_of(wheel: Path) -> set[str]:
    """Names that are required without any extra."""
    requirements = [Requirement(text) for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    return {one.name for one in requirements if one.marker is None or "extra" not in str(one.marker)}


def files_of(*folders: str) -> set[str]:
    """Files of packages in the source tree, as a wheel names them."""
    return {
        str(path.relative_to(ROOT)).removeprefix("proto/")
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and (path.suffix in KEPT or path.name == "py.typed")
    }


def test_wheels_are_their_packages_and_nothing_else(wheels: dict[str, Path]) -> None:
    adapter = files_of("lm_adapter", "proto/vision_encoder")
    assert content_of(wheels["adapter"]) == adapter | {"lm_adapter/pyproject.toml"}
    assert content_of(wheels["service"]) == adapter | files_of("encoder_service")
    for name in ("encoder_service/py.typed", "lm_adapter/py.typed", "vision_encoder/v1/encoder_pb2_grpc.pyi"):
        assert name in content_of(wheels["service"])


def test_metadata(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        assert metadata_of(wheel)["Version"] == encoder_service.__version__
    with zipfile.ZipFile(wheels["service"]) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "vision-encoder = encoder_service.cli:main" in archive.read(entry_points).decode()


def test_requirements(wheels: dict[str, Path]) -> None:
    assert requirements_of(wheels["adapter"]) == {"blake3", "grpcio", "numpy", "protobuf"}
    gpu_words = ("nvidia", "cuda", "triton", "flash", "fa3", "cupy", "transformers", "torchvision")
    assert not [
        name for name in requirements_of(wheels["service"]) if any(word in name for word in gpu_words)
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    adapter = tomllib.loads((ROOT / "lm_adapter" / "pyproject.toml").read_text())["project"]
    assert adapter["dependencies"] == project["optional-dependencies"]["adapter"]
    assert adapter["requires-python"] == project["requires-python"]


@pytest.mark.parametrize(
    ("wheel", "imports"), [("service", "encoder_service.cli, lm_adapter"), ("adapter", "lm_adapter")]
)
def test_an_unpacked_wheel_imports(wheel: str, imports: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels[wheel]) as archive:
        archive.extractall(tmp_path)
    code = f"import {imports}, vision_encoder.v1.encoder_pb2_grpc; print(lm_adapter.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(tmp_path / "lm_adapter" / "__init__.py")
