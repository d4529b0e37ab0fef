"""The service of a soak as a process of its own, and its figures.

Owns its settings, small enough that caches and queues fill and turn over within a minute, and the reading of
``/proc`` and of its metrics.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

MIB = 1 << 20
SETTINGS: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "admin_listen": "127.0.0.1:0",
    "arena_bytes": 16 * MIB,
    "max_image_pixels": 1_000_000,
    "max_patches_per_item": 4096,
    "max_clip_patches": 16_384,
    "max_message_bytes": 16 * MIB,
    "max_encoded_bytes": 4 * MIB,
    "max_queued_bytes": 64 * MIB,
    "max_queued_patches": 32_768,
    "max_undelivered_bytes": 16 * MIB,
    "ingest_threads": 1,
    "torch_threads": 1,
    "chunk_bytes": 16_384,
    "drain_grace_s": 10,
    "log_format": "json",
    "log_level": "warning",
}
# Metrics that are 0 while no caller runs.
HELD = ("ve_encodes_in_flight", "ve_queued_bytes", "ve_queued_patches", "ve_undelivered_bytes")
SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class SoakedService:
    """Started with the object, ended by ``stop``. folder: for its sockets and its log."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.target = f"unix:{folder}/grpc.sock"
        self._log_path = folder / "service.log"
        given = {
            **SETTINGS,
            "model": model,
            "listen": self.target,
            "broker_path": folder / "broker.sock",
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VE_")}
        environment |= {f"VE_{name.upper()}": str(value) for name, value in given.items()}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "encoder_service", "serve"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        found = re.search(r"\(admin (http://\S+)\)", ready)
        if found is None:
            self._process.communicate(timeout=30)
            raise RuntimeError(f"the service did not start: {self._log_path.read_text()[-2000:]}")
        self._admin = found[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def metrics(self) -> Counter[str]:
        """Figures by name, summed over labels."""
        with urllib.request.urlopen(f"{self._admin}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: Counter[str] = Counter()
        for name, value in SAMPLE.findall(text):
            found[name] += float(value)  # type: ignore[assignment]
        return found

    def figures(self) -> dict[str, float]:
        """Memory, descriptors and threads as the kernel counts them; the rest from the service's metrics."""
        found = self.metrics()
        return {
            **seen_from_outside(self.pid),
            "client_sockets": found["ve_broker_connections"],
            "calls": found["ve_requests_total"],
            "store_bytes": found["ve_store_bytes"],
            **{name: found[name] for name in HELD},
        }

    def errors(self) -> list[str]:
        """Errors and tracebacks in its log."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if '"level": "error"' in line or line.startswith("Traceback")]

    def stop(self) -> int:
        """By SIGTERM. The exit code."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode


def seen_from_outside(pid: int) -> dict[str, float]:
    """rss_bytes, pss_bytes, descriptors and threads of a process. Raises OSError once it is gone."""
    folder = Path(f"/proc/{pid}")
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE))
    return {
        "rss_bytes": float(sizes["Rss"]) * 1024,
        "pss_bytes": float(sizes["Pss"]) * 1024,
        "descriptors": float(len(os.listdir(folder / "fd"))),
        "threads": float(len(os.listdir(folder / "task"))),
    }
