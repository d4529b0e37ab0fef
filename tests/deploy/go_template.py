"""Renders the chart: the part of Go's text/template, sprig and Helm that its templates use, and no more.

Owns parsing and evaluation. Whatever it does not know is an error, never an empty text, so that a template
that leaves the subset is noticed. Where `helm` is on PATH, a test compares the two on every values file.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

ACTION = re.compile(r"\{\{(-\s)?\s*(/\*.*?\*/|.*?)\s*(\s-)?\}\}", re.DOTALL)
WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\$?[\w.]+|\$|\||\(|\)|:=|=|,|-?\d+)(?:(?<=\))(\.[\w.]+))?')
KEYWORDS = ("if", "range", "with", "define", "else", "end")


class TemplateError(Exception):
    """A template leaves the subset, or says `fail`."""


class Text(str):
    """What stands between actions."""

    __slots__ = ()


class StrictLoader(yaml.SafeLoader):
    """As Helm reads what it has rendered: a name that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        if twice := {name for name in names if names.count(name) > 1}:
            raise TemplateError(f"{sorted(twice)} twice, {node.start_mark}")
        return super().construct_mapping(node, deep)


Node = tuple[str, Any]


def tokens(source: str) -> Iterator[Text | str]:
    """Texts and actions in order, white space trimmed as the dashes say; comments are left out."""
    at, trim = 0, False
    for found in ACTION.finditer(source):
        text = source[at : found.start()]
        text = text.lstrip() if trim else text
        yield Text(text.rstrip() if found[1] else text)
        at, trim = found.end(), bool(found[3])
        if not found[2].startswith("/*"):
            yield found[2]
    text = source[at:]
    yield Text(text.lstrip() if trim else text)


def parse(stream: Iterator[Text | str], defined: dict[str, list[Node]]) -> tuple[list[Node], str]:
    """Nodes up to the action that ends them, and that action (empty at the end of the file)."""
    nodes: list[Node] = []
    for token in stream:
        if isinstance(token, Text):
            nodes.append(("text", str(token)))
            continue
        word, _, rest = token.partition(" ")
        if word in ("end", "else"):
            return nodes, token
        if word == "define":
            body, _ = parse(stream, defined)
            defined[rest.strip().strip('"')] = body
        elif word in ("if", "with", "range"):
            nodes.append((word, parse_branches(rest, stream, defined)))
        else:
            nodes.append(("action", token))
    return nodes, ""


def parse_branches(
    condition: str, stream: Iterator[Text | str], defined: dict[str, list[Node]]
) -> list[tuple[str, list[Node]]]:
    """(condition, nodes) in turn; the else branch has an empty condition."""
    branches = []
    while True:
        nodes, ended = parse(stream, defined)
        branches.append((condition, nodes))
        if ended == "end":
            return branches
        if not ended.startswith("else"):
            raise TemplateError(f"{condition!r} is never ended")
        condition = ended.removeprefix("else").strip().removeprefix("if").strip()


def to_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=False, width=10_000).removesuffix("...\n").rstrip("\n")


def text_of(value: object) -> str:
    """As text/template prints it."""
    if value is None:
        return "<no value>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, str | int):
        raise TemplateError(f"a {type(value).__name__} is printed")
    return str(value)


def quoted(value: object) -> str:
    text = text_of(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def indented(spaces: int, text: str) -> str:
    return "\n".join(" " * spaces + line for line in text.split("\n"))


def required(message: str, value: object) -> object:
    if value in (None, ""):
        raise TemplateError(message)
    return value


def fail(message: str) -> None:
    raise TemplateError(message)


def overwritten(target: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merge(target, given)
    return target


def put(target: dict[str, object], name: str, value: object) -> dict[str, object]:
    target[name] = value
    return target


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "toYaml": to_yaml,
    "fromYaml": yaml.safe_load,
    "quote": quoted,
    "nindent": lambda spaces, text: "\n" + indented(spaces, text),
    "default": lambda fallback, value: value or fallback,
    "printf": lambda form, *values: form % values,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "set": put,
    "eq": lambda one, other: one == other,
    "ne": lambda one, other: one != other,
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "divf": lambda one, other: float(one) / other,
    "trunc": lambda length, text: text[:length],
    "trimSuffix": lambda end, text: text.removesuffix(end),
    "replace": lambda old, new, text: text.replace(old, new),
    "add": lambda *numbers: sum(int(number) for number in numbers),
    "int": int,
    "float64": float,
    "ceil": math.ceil,
    "lt": lambda one, other: one < other,
    "fail": fail,
    "omit": lambda given, *names: {name: given[name] for name in given if name not in names},
    "get": lambda given, name: given.get(name, ""),
    "hasKey": lambda given, name: name in given,
    "deepCopy": copy.deepcopy,
    "mergeOverwrite": overwritten,
    "ternary": lambda yes, no, is_so: yes if is_so else no,
    "regexFind": lambda pattern, text: found[0] if (found := re.search(pattern, text)) else "",
    "urlParse": lambda text: {"scheme": urlsplit(text).scheme, "host": urlsplit(text).netloc},
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "required": required,
}


class Chart:
    """A chart's templates and files, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = yaml.safe_load((folder / "Chart.yaml").read_text())
        self.defined: dict[str, list[Node]] = {}
        self.templates: dict[str, list[Node]] = {}
        for path in sorted((folder / "templates").iterdir()):
            nodes, ended = parse(tokens(path.read_text()), self.defined)
            if ended:
                raise TemplateError(f"{path.name}: {ended!r} ends nothing")
            if path.suffix == ".yaml":
                self.templates[path.name] = nodes

    def values(self, *more: Mapping[str, Any]) -> dict[str, Any]:
        """values.yaml with others over it, maps merged."""
        merged: dict[str, Any] = yaml.safe_load((self.folder / "values.yaml").read_text())
        for given in more:
            merge(merged, given)
        return merged

    def render(self, values: Mapping[str, Any], *, release: str, namespace: str) -> list[dict[str, Any]]:
        """The objects of all templates."""
        root = {
            "Values": values,
            "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
            "Chart": {"Name": self.meta["name"], "Version": self.meta["version"]},
            "Files": self.folder,
        }
        objects = []
        for nodes in self.templates.values():
            text = Evaluation(self, root).run(nodes, root)
            objects += [found for found in yaml.load_all(text, StrictLoader) if found]
        return objects


def merge(into: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = value


class Evaluation:
    """One template's run: its variables, and `.`, which blocks change."""

    def __init__(self, chart: Chart, root: object) -> None:
        self.chart = chart
        self.variables: dict[str, object] = {"$": root}

    def run(self, nodes: list[Node], dot: object) -> str:
        return "".join(self.node(kind, content, dot) for kind, content in nodes)

    def node(self, kind: str, content: Any, dot: object) -> str:
        if kind == "text":
            return str(content)
        if kind == "action":
            assigned = re.match(r"(\$\w+)\s*:?=\s*(.*)", content, re.DOTALL)
            if assigned:
                self.variables[assigned[1]] = self.value(assigned[2], dot)
                return ""
            return text_of(self.value(content, dot))
        if kind == "range":
            ((head, body),) = content
            found = re.fullmatch(r"(\$\w+), (\$\w+) := (.*)", head)
            if not found:
                raise TemplateError(f"range {head!r} is not of the form $name, $value := map")
            shown = []
            for name, value in sorted(self.value(found[3], dot).items()):
                self.variables |= {found[1]: name, found[2]: value}
                shown.append(self.run(body, value))
            return "".join(shown)
        for condition, body in content:
            value = self.value(condition, dot) if condition else True
            if value:
                return self.run(body, value if kind == "with" and condition else dot)
        return ""

    def value(self, expression: str, dot: object) -> Any:
        words, at = [], 0
        expression = expression.strip()
        while at < len(expression):
            found = WORD.match(expression, at)
            if not found:
                raise TemplateError(f"{expression[at:]!r} in {expression!r} is not known")
            words.append(found[1])
            at = found.end()
        value, rest = self.pipeline(words, dot)
        if rest:
            raise TemplateError(f"{rest} is left of {expression!r}")
        return value

    def pipeline(self, words: list[str], dot: object) -> tuple[Any, list[str]]:
        piped: list[Any] = []
        while True:
            value, words = self.command(words, dot, piped)
            if words[:1] != ["|"]:
                return value, words
            piped, words = [value], words[1:]

    def command(self, words: list[str], dot: object, piped: list[Any]) -> tuple[Any, list[str]]:
        head, arguments = words[0], []
        is_call = head in FUNCTIONS or head in ("include", ".Files.Get")
        words = words[1:] if is_call else words
        while words and words[0] not in ("|", ")"):
            if words[0] == "(":
                argument, words = self.pipeline(words[1:], dot)
                if words[:1] != [")"]:
                    raise TemplateError("a bracket is not closed")
                words = words[1:]
            else:
                argument, words = self.operand(words[0], dot), words[1:]
            arguments.append(argument)
        arguments += piped
        if not is_call:
            if len(arguments) != 1:
                raise TemplateError(f"{head!r} is no function of the subset")
            return arguments[0], words
        if head == "include":
            name, data = arguments
            return Evaluation(self.chart, data).run(self.chart.defined[name], data), words
        if head == ".Files.Get":
            return (self.chart.folder / arguments[0]).read_text(), words
        return FUNCTIONS[head](*arguments), words

    def operand(self, word: str, dot: object) -> Any:
        if word.startswith('"'):
            return yaml.safe_load(word)
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        name, *path = word.split(".")
        if name == "" and path == [""]:
            return dot
        if name and name not in self.variables:
            raise TemplateError(f"{word!r} is not known")
        value: Any = self.variables[name] if name else dot
        for part in path:
            if not isinstance(value, Mapping):
                raise TemplateError(f"{word!r}: {part!r} is asked of a {type(value).__name__}")
            # Helm's templates print nothing sensible for a missing value; here it is an error.
            if part not in value:
                raise TemplateError(f"{word!r}: there is no {part!r}")
            value = value[part]
        return value
