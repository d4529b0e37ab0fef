"""A headless Chromium, driven over its debugging pipe: no package, no port, no display.

Owns the process and the protocol's framing (messages of JSON, each ended by a NUL, on descriptors 3 and 4).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. problems: whatever the browser complained about, refused resources included; requests: every
    address that was asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._last_id = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self._call(f"{domain}.enable")

    def go(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, timeout_s: float = 30.0) -> None:
        """Waits until an expression is true."""
        ends_s = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < ends_s, f"still not true: {script}; {self.problems}"
            time.sleep(0.05)

    def choose_file(self, selector: str, path: Path) -> None:
        """As a person would with the file dialogue."""
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends_s = time.monotonic() + 60
        while True:
            answer = self._next(ends_s)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, ends_s: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            readable, _, _ = select.select([self._from], [], [], max(0.0, ends_s - time.monotonic()))
            assert readable, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


def high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that the browser is to find."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 32) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@contextlib.contextmanager
def browsing(executable: str) -> Iterator[Page]:
    """A page of a browser with a profile of its own."""
    to_browser, from_us = high_pipe()
    from_browser, to_us = high_pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Not by subprocess: where that forks, gRPC's handlers of forks stop a server in this process for
        # seconds. The browser reads descriptor 3 and writes 4.
        pid = os.posix_spawn(
            executable,
            [
                executable, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
            ],
            {**os.environ, "HOME": profile},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, to_browser, 3),
                (os.POSIX_SPAWN_DUP2, to_us, 4),
            ],
            setpgroup=0,
        )  # fmt: skip
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Page(from_us, from_browser)
        finally:
            os.killpg(pid, signal.SIGKILL)  # the browser is several processes
            os.waitpid(pid, 0)
            os.close(from_us)
            os.close(from_browser)
