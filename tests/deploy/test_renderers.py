"""The tests' own builders against the real programs, where those are on PATH, and their refusals anywhere."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import kustomize
from tests.deploy.go_template import Chart, TemplateError
from tests.deploy.rendering import BUILDS, CHART, NAME, Object, built, charted, folder_of


def in_order(node: Any) -> Any:
    """Lists of named things sorted by name: their order means nothing."""
    if isinstance(node, dict):
        return {name: in_order(value) for name, value in node.items()}
    if isinstance(node, list):
        parts = [in_order(part) for part in node]
        is_named = all(isinstance(part, dict) and "name" in part for part in parts)
        return sorted(parts, key=lambda part: str(part["name"])) if is_named else parts
    return node


def by_name(objects: Any) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): in_order(each) for each in objects if each}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
@pytest.mark.parametrize("build", BUILDS)
def test_kubectl_builds_the_same(build: str) -> None:
    ended = subprocess.run(
        ["kubectl", "kustomize", str(folder_of(build))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert by_name(yaml.safe_load_all(ended.stdout)) == by_name(built(build))


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on PATH")
@pytest.mark.parametrize("build", BUILDS)
def test_helm_renders_the_same(build: str) -> None:
    values = [] if build == "base" else ["-f", str(CHART / f"values-{build}.yaml")]
    ended = subprocess.run(
        ["helm", "template", NAME, str(CHART), "--namespace", NAME, *values],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    theirs, ours = by_name(yaml.safe_load_all(ended.stdout)), by_name(charted(build))
    for objects in (theirs, ours):
        # The same settings, written in two ways of YAML.
        del objects["Deployment", NAME]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
    assert theirs == ours


def test_a_kustomization_that_leaves_the_subset_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\nnamePrefix: x-\n")
    with pytest.raises(kustomize.UnknownFeature, match="namePrefix"):
        kustomize.build(tmp_path)


def test_a_changed_setting_changes_the_config_maps_name_and_the_pods(tmp_path: Path) -> None:
    def names(value: str) -> tuple[str, str]:
        (tmp_path / "kustomization.yaml").write_text(
            f"resources: [{folder_of('base')}]\n"
            "configMapGenerator:\n"
            f"  - {{name: vision-encoder-config, behavior: merge, literals: [VE_LOG_LEVEL={value}]}}\n"
        )
        objects = kustomize.build(tmp_path)
        (config,) = (each for each in objects if each["kind"] == "ConfigMap")
        (deployment,) = (each for each in objects if each["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return config["metadata"]["name"], container["envFrom"][0]["configMapRef"]["name"]

    assert names("info")[0] == names("info")[1]
    assert names("info") != names("debug")


def test_a_strategic_merge_changes_what_has_the_name_and_keeps_the_rest() -> None:
    old: Object = {
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {"sizeLimit": "1Gi"}}]
    }
    patch = {"volumes": [{"name": "b", "emptyDir": {"sizeLimit": "2Gi"}}, {"name": "c", "emptyDir": None}]}
    kept = copy.deepcopy(patch)
    kustomize.merge_into(old, patch)
    assert {each["name"]: each.get("emptyDir") for each in old["volumes"]} == {
        "a": {},
        "b": {"sizeLimit": "2Gi"},
        "c": None,
    }
    assert patch == kept


def chart_with(folder: Path, template: str) -> Chart:
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("name: c\nversion: 1.0.0\n")
    (folder / "values.yaml").write_text("n: 3\nlist: [a, b]\nmap: {x: '1', y: '2'}\nempty: ''\nno_: false\n")
    (folder / "templates" / "t.yaml").write_text(template)
    return Chart(folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a: {{ .Values.n }}m", {"a": "3m"}),
        ("a: {{ if .Values.no_ }}1{{ else if eq .Values.n 3 }}2{{ else }}3{{ end }}", {"a": 2}),
        ("a:\n  {{- toYaml .Values.list | nindent 2 }}", {"a": ["a", "b"]}),
        ("a: {{ default .Release.Name .Values.empty | trunc 2 | quote }}", {"a": "re"}),
        ("{{- range $k, $v := .Values.map }}\n{{ $k }}: {{ $v | quote }}\n{{- end }}", {"x": "1", "y": "2"}),
        ("{{- with .Values.map }}\na: {{ .x }}\n{{- end }}", {"a": 1}),
        (
            '{{- define "d" -}}\nb: {{ .v }}\n{{- end }}\na:\n{{- include "d" (dict "v" 1) | nindent 2 }}',
            {"a": {"b": 1}},
        ),
        (
            '{{/* a: 1 */}}\n{{- $x := printf "%s-%s" .Release.Name .Chart.Version }}\na: {{ $x }}',
            {"a": "rel-1.0.0"},
        ),
        ("a: {{ divf 750 1000 | quote }}", {"a": "0.75"}),
    ],
)  # fmt: skip
def test_templates_are_rendered_as_go_does(template: str, expected: Object, tmp_path: Path) -> None:
    chart = chart_with(tmp_path / "c", template)
    assert chart.render(chart.values(), release="rel", namespace="n") == [expected]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a: {{ .Values.nothing }}", "there is no 'nothing'"),
        ("a: {{ lookup 1 2 }}", "is not known|no function"),
        ("a: {{ .Values.list }}", "a list is printed"),
        ('a: {{ required "say it" .Values.empty }}', "say it"),
        ("{{ if .Values.n }}a: 1", "never ended"),
        ("a: 1{{ end }}", "ends nothing"),
    ],
)
def test_a_template_that_leaves_the_subset_is_noticed(template: str, message: str, tmp_path: Path) -> None:
    def render() -> None:
        chart = chart_with(tmp_path / "c", template)
        chart.render(chart.values(), release="rel", namespace="n")

    with pytest.raises(TemplateError, match=message):
        render()
