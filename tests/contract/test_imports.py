"""Direction of imports (the contracts run in ``make lint``), packages loaded at import, names, sizes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoder_service", "lm_adapter")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DEVICE_CODE = (
    "encoder_service.towers.gemm.quack_gemm",
    "encoder_service.towers.kernels",
    "lm_adapter.kernels.",
)
MAX_LINES = 700
VAGUE_NAMES = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "manager",
    "managers",
    "shared",
    "base",
}

RUN_LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def module_name(path: Path) -> str:
    """The dotted name of a file of this repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the contracts of ``root``'s pyproject.toml."""
    return subprocess.run(
        [sys.executable, "-c", RUN_LINTER],
        cwd=root, env={**os.environ, "PYTHONPATH": f"{root}:{root / 'proto'}", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("encoder_service/errors.py", "import encoder_service.towers"),
        ("encoder_service/scheduler/__init__.py", "import time"),
        ("lm_adapter/__init__.py", "import encoder_service.errors"),
    ],
)
def test_a_broken_contract_is_noticed(tmp_path: Path, module: str, line: str) -> None:
    for package in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    completed = lint_imports(tmp_path)
    assert completed.returncode == 1
    assert "BROKEN" in completed.stdout


# Run in a fresh interpreter: refuses the given modules, then imports the others.
IMPORT_WITHOUT = """
import importlib, sys
refused, wanted = sys.argv[1].split(","), sys.argv[2].split(",")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ImportError(f"{name} is imported, and may not be")
sys.meta_path.insert(0, Refuse())
for name in wanted:
    importlib.import_module(name)
"""


def import_without(refused: list[str], wanted: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_WITHOUT, ",".join(refused), ",".join(wanted)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_adapter_imports_on_its_own_dependencies() -> None:
    """Every module of it, with the service's and the models' packages out of reach, torch included."""
    wanted = [module_name(path) for path in MODULES if path.is_relative_to(ROOT / "lm_adapter")]
    wanted = [name for name in wanted if not name.startswith(DEVICE_CODE)]
    refused = ["encoder_service", "fastapi", "transformers", "triton", "torch", "pydantic", "blake3", "PIL"]
    completed = import_without(refused, wanted)
    assert completed.returncode == 0, completed.stderr


def test_the_service_imports_without_a_gpu_package_or_the_reference() -> None:
    wanted = [module_name(path) for path in MODULES if path.is_relative_to(ROOT / "encoder_service")]
    wanted.remove("encoder_service.__main__")
    # Device code: imported by what runs on CUDA, when it is built.
    wanted = [name for name in wanted if not name.startswith(DEVICE_CODE)]
    completed = import_without(
        ["transformers", "torchvision", "triton", "flash_attn", "fa3_fwd_interface", "quack", "cutlass"],
        wanted,
    )
    assert completed.returncode == 0, completed.stderr


def test_a_probe_loads_nothing_that_takes_long() -> None:
    """Kubernetes may run one every few seconds in the service's own container."""
    wanted = ["encoder_service.cli", "encoder_service.rpc.health_check"]
    completed = import_without(["torch", "PIL", "fastapi", "structlog"], wanted)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_module_names_say_what_is_inside(package: str) -> None:
    parts = {part for path in MODULES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert package in parts
    assert parts & VAGUE_NAMES == set()


def test_no_module_is_too_long() -> None:
    lengths = {module_name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_third_party_import_is_a_declared_dependency(package: str) -> None:
    """Of all imports of the service; of the adapter's imports at module level."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if package == "encoder_service":
        optional = [name for name in extras if name not in ("adapter", "dev", "engines", "hf", "vllm")]
        declared = project["dependencies"] + [text for name in optional for text in extras[name]]
    else:
        adapter = tomllib.loads((ROOT / "lm_adapter" / "pyproject.toml").read_text())["project"]
        assert sorted(adapter["dependencies"]) == sorted(extras["adapter"])
        declared = extras["adapter"]
    distributions = {re.split(r"[<>=!~\[; ]", text)[0].lower().replace("_", "-") for text in declared}

    undeclared = set()
    for path in (path for path in MODULES if path.is_relative_to(ROOT / package)):
        if package == "lm_adapter" and module_name(path).startswith(DEVICE_CODE):
            continue  # torch and triton, which the engine brings
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree)) if package == "encoder_service" else run_at_import(tree)
        for name in imported_roots(nodes):
            if name not in OWN_ROOTS and DISTRIBUTION_OF.get(name, name) not in distributions:
                undeclared.add(f"{module_name(path)} imports {name}")
    assert undeclared == set()


OWN_ROOTS = {"encoder_service", "lm_adapter", "vision_encoder", *sys.stdlib_module_names}
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-api",
    "pydantic": "pydantic-settings",
    "pydantic_settings": "pydantic-settings",
    "cuda": "cuda-bindings",
    "fa3_fwd_interface": "fa3-fwd",
    "flash_attn": "flash-attn",
    "quack": "quack-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "triton": "torch",
    "starlette": "fastapi",
    "click": "typer",
}


def run_at_import(tree: ast.Module) -> list[ast.AST]:
    """Statements that run when the module is imported: not in functions, not for type checkers only."""
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return nodes


def imported_roots(nodes: list[ast.AST]) -> set[str]:
    """Top-level names of absolute imports among these nodes."""
    roots = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots
