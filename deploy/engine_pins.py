"""Records what environments of the newest engines have, in tests/contract/engine_pins: `make engine-pins`.

Owns these files. tests/contract/test_packaging.py compares them with what the adapter needs there. Only
metadata is fetched, and nothing is installed. Needs uv, which install.py installs.
"""

from __future__ import annotations

import subprocess
import sys

from install import ROOT, uv_environment

PINS = ROOT / "tests" / "contract" / "engine_pins"
ENGINES = ("vllm", "sglang", "lmdeploy")
TARGET = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")


def resolved(requirements: list[str], *options: str) -> list[str]:
    """Distributions with their versions, one a line. Raises SystemExit, below uv's own message, if
    the requirements contradict each other."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "-q", "--no-header", "--no-annotate"]
    ended = subprocess.run(
        [*command, *TARGET, *options],
        input="\n".join(requirements), env=uv_environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"could not resolve {' with '.join(requirements)}")
    return ended.stdout.splitlines()


def main() -> None:
    for engine in ENGINES:
        (newest,) = resolved([engine], "--no-deps")
        pins = resolved([newest])
        resolved([newest, f"{ROOT}[{engine},cuda]"])  # raises where the extra does not fit
        for old in PINS.glob(f"{engine}-*.txt"):
            old.unlink()
        name, _, version = newest.partition("==")
        header = (
            f"# An environment of {name} {version}, Python 3.12 on Linux. Written by deploy/engine_pins.py."
        )
        (PINS / f"{name}-{version}.txt").write_text("\n".join([header, *pins, ""]))
        print(f"{newest}: {len(pins)} packages")


if __name__ == "__main__":
    main()
