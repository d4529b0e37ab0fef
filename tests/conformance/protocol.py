"""How an implementation is asked, in this process or in another one.

Owns the messages and their transport. What is asked, and what answers are right, is ``vectors``'s.

In process an implementation maps a subject's name to a function of the input. In another process it reads one
JSON object a line from its standard input, ``{"id": 7, "subject": "pad_id", "input": {...}}``, and writes one
a line to its standard output: ``{"id": 7, "output": {...}}``, ``{"id": 7, "unsupported": true}`` or
``{"id": 7, "error": "text"}``. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, TypeAlias

Answer: TypeAlias = Any
Function: TypeAlias = Callable[[Any], Answer]


class Unsupported(Exception):
    """The implementation does not do this subject."""


class Failed(Exception):
    """The implementation answered with an error, not at all, or not in the protocol."""


class Implementation(Protocol):
    def ask(self, subject: str, asked: Any) -> Answer:
        """The output. Raises Unsupported and Failed."""

    def close(self) -> None: ...


class InProcess:
    """Functions by subject."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = functions

    @classmethod
    def load(cls, name: str) -> InProcess:
        """``module:factory``, where ``factory()`` returns the functions by subject."""
        module, _, factory = name.partition(":")
        if not factory:
            raise Failed(f"an implementation is named module:factory, got {name!r}")
        return cls(getattr(importlib.import_module(module), factory)())

    def ask(self, subject: str, asked: Any) -> Answer:
        if subject not in self._functions:
            raise Unsupported(subject)
        try:
            # Through JSON both ways: what passes here passes over the line protocol as well.
            output = self._functions[subject](json.loads(json.dumps(asked)))
            return json.loads(json.dumps(output))
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        pass


class Subprocess:
    """The line protocol. timeout_s: for one answer; after a silence or an end every later question fails."""

    def __init__(self, command: Sequence[str], *, timeout_s: float = 30.0) -> None:
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise Failed(f"{command[0]!r} cannot be started: {error}") from error
        self._timeout_s = timeout_s
        self._next_id = 0
        self._broken: str | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, subject: str, asked: Any) -> Answer:
        if self._broken:
            raise Failed(self._broken)
        self._next_id += 1
        assert self._process.stdin is not None
        try:
            question = {"id": self._next_id, "subject": subject, "input": asked}
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._break(f"the process takes no more questions: {error}") from error
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._break(f"no answer within {self._timeout_s} s") from None
        if not line:
            raise self._break(f"the process ended with status {self._process.wait()}")
        return self._answer(line)

    def _answer(self, line: str) -> Answer:
        try:
            reply = json.loads(line)
            number = reply["id"]
        except (ValueError, TypeError, KeyError) as error:
            raise self._break(f"not an answer: {line[:200]!r} ({error!r})") from error
        if number != self._next_id:
            raise self._break(f"answer {number} came to question {self._next_id}")
        if reply.get("unsupported"):
            raise Unsupported
        if "output" not in reply:
            raise Failed(str(reply.get("error", "neither output nor error")))
        return reply["output"]

    def _break(self, why: str) -> Failed:
        self._broken = why
        return Failed(why)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it was gone already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0 if self._broken else 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def serve(functions: Mapping[str, Function], questions: TextIO, answers: TextIO) -> None:
    """The other side of the line protocol, for implementations in Python, and the pattern for others."""
    for line in questions:
        question = json.loads(line)
        reply: dict[str, Any] = {"id": question["id"]}
        function = functions.get(question["subject"])
        if function is None:
            reply["unsupported"] = True
        else:
            try:
                reply["output"] = function(question["input"])
            except Exception as error:
                reply["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
