"""The gateway as a process: the real Envoy with deploy/envoy/gateway.yaml.

Owns its start, the only changes to the shipped file (addresses and the name server), and what it says of
itself: members, counters, the access log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from bench.harness.ports import free_port
from bench.harness.processes import ROOT, program
from bench.harness.waiting import wait_until

CONFIG = ROOT / "deploy" / "envoy" / "gateway.yaml"
NAME = "vision-encoder-headless"
CARES = "envoy.network.dns_resolver.cares"
CARES_TYPE = "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
STOP_S = 20.0
ADMIN_S = 5.0
Change = Callable[[dict[str, Any]], None]


def part(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """The listener or cluster of that name. kind: ``listeners`` or ``clusters``."""
    (found,) = (one for one in config["static_resources"][kind] if one["name"] == name)
    return dict_of(found)


def dict_of(value: Any) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


def with_addresses(
    config: dict[str, Any], port: int, admin_port: int, operations_port: int, dns_port: int
) -> dict[str, Any]:
    """The shipped configuration on this machine: its own addresses, and who answers for the name."""
    address: dict[str, Any] = {"address": "127.0.0.1", "port_value": port}
    part(config, "listeners", "calls")["address"]["socket_address"] = address
    operations = part(config, "listeners", "operations")
    operations["address"]["socket_address"] = address | {"port_value": operations_port}
    admin = address | {"port_value": admin_port}
    config["admin"]["address"]["socket_address"] = admin
    (endpoints,) = part(config, "clusters", "admin")["load_assignment"]["endpoints"]
    endpoints["lb_endpoints"][0]["endpoint"]["address"]["socket_address"] = admin
    dns = part(config, "clusters", "encoders")["cluster_type"]["typed_config"]
    dns["typed_dns_resolver_config"] = {
        "name": CARES,
        "typed_config": {
            "@type": CARES_TYPE,
            "resolvers": [{"socket_address": {"address": "127.0.0.1", "port_value": dns_port}}],
            "dns_resolver_options": {"no_default_search_domain": True},
        },
    }
    return config


class Gateway:
    """One Envoy; a context manager. It can be killed and started again, with the same ports."""

    def __init__(
        self, folder: Path, dns_port: int, *, config: Path = CONFIG, change: Change | None = None
    ) -> None:
        """change: to a configuration that a measurement compares with the shipped one."""
        self.port, self._admin_port, self.operations_port = free_port(), free_port(), free_port()
        self.target = f"127.0.0.1:{self.port}"
        self._log = folder / f"gateway-{self.port}.log"
        self._calls = folder / f"gateway-{self.port}-calls.log"
        self._config = folder / f"gateway-{self.port}.yaml"
        loaded = yaml.safe_load(config.read_text(encoding="utf-8"))
        with_addresses(loaded, self.port, self._admin_port, self.operations_port, dns_port)
        if change is not None:
            change(loaded)
        self._config.write_text(yaml.safe_dump(loaded), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> None:
        """Returns once it answers, which it does after the first round of health checks."""
        command = [program("envoy"), "--config-path", str(self._config), "--concurrency", "2"]
        command += ["--disable-hot-restart", "--log-level", "warning", "--log-path", str(self._log)]
        command += ["--file-flush-interval-msec", "200"]  # by default entries come ten seconds late
        with self._calls.open("ab") as calls:
            self._process = subprocess.Popen(command, stdout=calls, stderr=calls, cwd=os.sep)
        wait_until(self._is_ready, "the gateway")

    def end(self, number: signal.Signals) -> None:
        """Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
        try:
            return self._admin("/ready").startswith(b"LIVE")
        except OSError:
            return False

    def _admin(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}{path}", timeout=ADMIN_S) as answer:
            body: bytes = answer.read()
        return body

    def counters(self) -> dict[str, int]:
        """Of the cluster of encoders, by their name there."""
        stats = json.loads(self._admin("/stats?format=json&filter=^cluster\\.encoders\\."))["stats"]
        prefix = "cluster.encoders."
        return {
            one["name"].removeprefix(prefix): one["value"]
            for one in stats
            if isinstance(one.get("value"), int)
        }

    def members(self) -> tuple[int, int]:
        """Replicas, and the healthy ones among them."""
        counters = self.counters()
        return counters["membership_total"], counters["membership_healthy"]

    def wait_members(self, number: int) -> float:
        """Until it has so many replicas and all are healthy. Returns the seconds that it took."""
        started_s = time.monotonic()
        wait_until(lambda: self.members() == (number, number), f"{number} healthy replicas at {self.target}")
        return time.monotonic() - started_s

    def active_calls(self, address: str) -> int:
        """Calls that the replica at this address has from this gateway."""
        clusters = json.loads(self._admin("/clusters?format=json"))["cluster_statuses"]
        (encoders,) = (one for one in clusters if one["name"] == "encoders")
        for host in encoders["host_statuses"]:
            if host["address"]["socket_address"]["address"] == address:
                gauges = {one["name"]: int(one.get("value", 0)) for one in host["stats"]}
                return gauges["rq_active"]
        return 0

    def operations(self, path: str) -> str:
        """A page of the listener for probes and Prometheus. Raises OSError."""
        url = f"http://127.0.0.1:{self.operations_port}{path}"
        with urllib.request.urlopen(url, timeout=ADMIN_S) as answer:
            body: bytes = answer.read()
        return body.decode()

    def access_log(self) -> AccessLog:
        """Of the calls from now on."""
        return AccessLog(self._calls)


def now_text() -> str:
    """As Envoy writes the time at which a call began: in whole milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class AccessLog:
    """Reads the entries of calls that began later than the reader. Envoy writes entries within a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size
        self._made = now_text()
        wait_until(lambda: now_text() > self._made, "the next millisecond")

    def read(self) -> list[dict[str, Any]]:
        """Those that are new since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        entries = [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        return [one for one in entries if one["time"] > self._made]
