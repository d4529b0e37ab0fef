"""The modules of the model side import with numpy and nothing heavier."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "alignment",
    "clip_texts",
    "engines",
    "engines.hf",
    "kernels",
    "mrope",
    "placeholders",
    "prefix_cache",
    "rotary",
    "splice",
]


@pytest.mark.parametrize("module", MODULES)
def test_imports_without_torch_or_transformers(module: str) -> None:
    """Blocked, not merely unused: where they are not installed the import succeeds all the same."""
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'transformers', 'safetensors', 'encoder_service', 'fastapi', 'triton'):\n"
        "    sys.modules[name] = None\n"
        f"module = importlib.import_module('lm_adapter.{module}')\n"
        "assert all(hasattr(module, name) for name in getattr(module, '__all__', ()))\n"
    )
    paths = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=paths, check=True, timeout=60)


def test_loading_without_torch_says_what_is_missing() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from lm_adapter.engines.hf import load_language_model\n"
        "from lm_adapter.errors import MissingDependency\n"
        "try:\n"
        "    load_language_model('anywhere')\n"
        "except MissingDependency as error:\n"
        "    print(error)\n"
    )
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=paths, check=True, timeout=60, capture_output=True, text=True
    )
    assert "needs the package torch" in done.stdout


def test_importing_the_adapter_reaches_few_modules_and_nothing_heavy() -> None:
    code = (
        "import inspect, sys\n"
        "import lm_adapter\n"
        "ours = [m for n, m in sys.modules.items() if n.partition('.')[0] == 'lm_adapter']\n"
        "print(len(ours), sum(len(inspect.getsource(m).splitlines()) for m in ours))\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'triton', 'cuda', 'blake3', 'encoder_service')\n"
        "assert not [n for n in sys.modules if n.partition('.')[0] in heavy]\n"
    )
    paths = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=paths, check=True, timeout=60, capture_output=True, text=True
    )
    num_modules, num_lines = map(int, done.stdout.split())
    assert num_modules <= 25
    assert num_lines <= 3500
