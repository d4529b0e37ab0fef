"""The compose files name images, files, settings and addresses that exist, and fit compose's schema."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_pydantic import ComposeSpecification

from encoder_service.config import Settings
from tests.contract.test_images import environment_of
from tests.shell import ENCODER, serving, shell_with

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))
PUBLIC = re.compile(r"(nvidia/cuda|envoyproxy/envoy):v?\d+\.\d+\.\d+[\w.-]*")


def services(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["services"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_fits_the_schema(path: Path) -> None:
    ComposeSpecification.model_validate(yaml.safe_load(path.read_text()))
    has_compose = (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    )
    if has_compose:
        environment = {**os.environ, "MODEL": "ORG/NAME"}
        subprocess.run(["docker", "compose", "-f", path, "config", "-q"], env=environment, check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_files_and_settings_exist(path: Path) -> None:
    for service in services(path).values():
        if "build" in service:
            dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
            assert f"-t {service['image']} ." in dockerfile, "the image that the documented command builds"
        else:
            assert PUBLIC.fullmatch(service["image"])
        mounted = [volume.split(":")[0] for volume in service.get("volumes", ()) if volume.startswith(".")]
        assert all((path.parent / source).is_file() for source in mounted)
        names = {name for name in service.get("environment", {}) if name.startswith("VE_")}
        assert names <= {f"VE_{name.upper()}" for name in Settings.model_fields}


def test_envoy_finds_the_encoders_by_the_name_that_they_share() -> None:
    found = services(ROOT / "deploy/compose/gateway.yaml")
    encoders = [service for name, service in found.items() if name.startswith("encoder")]
    assert (
        len(
            {
                service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0]
                for service in encoders
            }
        )
        == 2
    )
    gateway = yaml.safe_load((ROOT / "deploy/envoy/gateway.yaml").read_text())
    (cluster,) = [c for c in gateway["static_resources"]["clusters"] if c["name"] == "encoders"]
    endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    name = endpoint["address"]["socket_address"]["address"]
    assert all(name in service["networks"]["default"]["aliases"] for service in encoders)


def test_vllm_s_arguments_are_those_of_its_page_with_the_encoder_s_name() -> None:
    found = services(ROOT / "deploy/compose/shared-gpu.yaml")
    command = found["vllm"]["command"]
    transfer = json.loads(command[command.index("--ec-transfer-config") + 1])
    page = re.search(r"--ec-transfer-config '(\{.*?\})'", (ROOT / "docs/vllm.md").read_text(), re.DOTALL)
    assert page
    expected = json.loads(page[1])
    expected["ec_connector_extra_config"]["target"] = "encoder:50051"
    assert transfer == expected
    socket_folder = str(Path(found["encoder"]["environment"]["VE_BROKER_PATH"]).parent)
    for name in ("encoder", "vllm"):
        assert f"sockets:{socket_folder}" in found[name]["volumes"]
        assert found[name]["ipc"] == "service:mps"


@pytest.mark.extended
def test_the_file_of_a_cpu_makes_a_checkpoint_and_serves_it(tmp_path: Path) -> None:
    """Its command with the image's variables, and no container."""
    service = services(ROOT / "deploy/compose/cpu.yaml")["encoder"]
    addresses = {"VE_LISTEN": "127.0.0.1:0", "VE_ADMIN_LISTEN": "127.0.0.1:0"}
    variables = environment_of(ROOT / service["build"]["dockerfile"]) | addresses
    del variables["PATH"], variables["HOME"]
    *program, script = service["entrypoint"]
    command = shlex.join([*program, script.replace("/tmp/", f"{tmp_path}/")])
    with serving(command, shell_with(tmp_path, {"vision-encoder": ENCODER}, variables), tmp_path) as ready:
        assert ready["family"] == "qwen3_vl"
