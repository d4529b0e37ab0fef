"""Packages loaded at import, and dependencies. ``make lint`` checks the direction of imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from tests.unit.lm_adapter.interpreter import output_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoder_service", "lm_adapter")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DEVICE_CODE = (
    "encoder_service.towers.gemm.quack_gemm",
    "encoder_service.towers.kernels",
    "lm_adapter.prefill.kernels.",
)
ENGINE_CODE = (
    "lm_adapter.engines.lmdeploy.encoder",
    "lm_adapter.engines.lmdeploy.engine",
    "lm_adapter.engines.lmdeploy.media",
    "lm_adapter.engines.lmdeploy.models",
    "lm_adapter.engines.lmdeploy.rank",
    "lm_adapter.engines.lmdeploy.serve",
    "lm_adapter.engines.lmdeploy.server",
    "lm_adapter.engines.sglang.models",
    "lm_adapter.engines.sglang.processors",
    "lm_adapter.engines.vllm.api_server.glm",
    "lm_adapter.engines.vllm.api_server.kimi",
    "lm_adapter.engines.vllm.api_server.kimi_images",
    "lm_adapter.engines.vllm.api_server.ling",
    "lm_adapter.engines.vllm.api_server.media",
    "lm_adapter.engines.vllm.api_server.parser",
    "lm_adapter.engines.vllm.api_server.processor",
    "lm_adapter.engines.vllm.api_server.qwen2_5_vl",
    "lm_adapter.engines.vllm.api_server.qwen3_omni",
    "lm_adapter.engines.vllm.api_server.server",
)
"""Subclasses of an engine's classes. The engine imports them."""


def module_name(path: Path) -> str:
    """The dotted name of a file of this repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


IMPORT_WITHOUT = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in refused):
            raise ImportError(f"{name} is imported, and may not be")
sys.meta_path.insert(0, Refuse())
for name in wanted:
    importlib.import_module(name)
"""


def import_without(refused: list[str], wanted: list[str]) -> None:
    output_of(f"refused, wanted = {refused}, {wanted}\n{IMPORT_WITHOUT}")


def test_settings_are_checked_without_torch() -> None:
    """All that ``serve`` imports before it says that it does."""
    names = ("cli.serve", "config", "defaults", "checkpoints.hub_id", "ingest.allowed_urls", "ops.addresses")
    import_without(["torch", "transformers"], [f"encoder_service.{name}" for name in names])


def test_the_adapter_imports_on_its_own_dependencies() -> None:
    """Every module of it, with the service's and the models' packages out of reach, torch included."""
    wanted = [module_name(path) for path in MODULES if path.is_relative_to(ROOT / "lm_adapter")]
    wanted = [name for name in wanted if not name.startswith((*DEVICE_CODE, *ENGINE_CODE))]
    refused = ["encoder_service", "fastapi", "transformers", "triton", "torch", "pydantic", "PIL"]
    import_without(refused, wanted)


def test_the_service_imports_without_a_gpu_package_traces_or_the_reference() -> None:
    wanted = [module_name(path) for path in MODULES if path.is_relative_to(ROOT / "encoder_service")]
    wanted.remove("encoder_service.__main__")
    # Device code: imported by what runs on CUDA, when it is built.
    wanted = [name for name in wanted if not name.startswith(DEVICE_CODE)]
    of_device = ["triton", "flash_attn", "fa3_fwd_interface", "quack", "cutlass"]
    import_without([*of_device, "transformers", "torchvision", "opentelemetry.sdk"], wanted)


def test_a_probe_loads_nothing_that_takes_long() -> None:
    """Kubernetes may run one every few seconds in the service's own container."""
    wanted = ["encoder_service.cli", "grpc_health.v1.health_pb2_grpc", "lm_adapter.channel"]
    import_without(["torch", "PIL", "fastapi", "structlog", "pydantic_settings"], wanted)


def test_client_commands_need_the_adapters_dependencies_alone() -> None:
    """And what prints: an installation without the service has them too."""
    names = ("bench", "bench_images", "bench_load", "encode", "encode_report", "info", "rows_output")
    of_service = ["torch", "PIL", "fastapi", "structlog", "pydantic", "pydantic_settings", "safetensors"]
    import_without(of_service, [f"encoder_service.cli.{name}" for name in names])


def test_every_third_party_import_of_the_service_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = ("serve", "cuda", "fa3", "fa4", "otel", "tokenspeed")
    declared = project["dependencies"] + [text for name in optional for text in extras[name]]
    distributions = {re.split(r"[<>=!~\[; ]", text)[0].lower().replace("_", "-") for text in declared}
    undeclared = {
        f"{module_name(path)} imports {name}"
        for path in MODULES
        if path.is_relative_to(ROOT / "encoder_service")
        for name in imported_roots(ast.parse(path.read_text()))
        if name not in OWN_ROOTS and DISTRIBUTION_OF.get(name, name) not in distributions
    }
    assert undeclared == set()


OWN_ROOTS = {"encoder_service", "lm_adapter", "vision_encoder", *sys.stdlib_module_names}
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "fastapi_offline": "fastapi-offline",
    "google": "protobuf",
    "grpc": "grpcio",
    "huggingface_hub": "huggingface-hub",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-api",
    "pydantic": "pydantic-settings",
    "python_multipart": "python-multipart",
    "yaml": "pyyaml",
    "pydantic_settings": "pydantic-settings",
    "cuda": "cuda-bindings",
    "fa3_fwd_interface": "fa3-fwd",
    "quack": "quack-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "triton": "torch",
    "starlette": "fastapi",
    "click": "typer",
    "zmq": "pyzmq",
}


def imported_roots(tree: ast.Module) -> set[str]:
    """Top-level names of all absolute imports."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def test_the_wall_clock_is_read_for_traces_and_dates_of_certificates_alone() -> None:
    """Deadlines, protections, tokens and drains are unaffected when the wall clock is set. A certificate's
    dates only cause a warning."""
    reads = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\b|CLOCK_REALTIME")
    found = {module_name(path) for path in MODULES if reads.search(path.read_text())}
    assert found == {"encoder_service.ops.tls", "encoder_service.ops.traces"}
