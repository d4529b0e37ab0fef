"""Builds kustomizations: the part of kustomize that deploy/k8s uses, and no more.

Owns resources, components, images, namespace, ConfigMap generators with their name hash, strategic merge and
JSON patches. What it does not know is an error. Where `kubectl` is on PATH, a test compares the two on every
overlay.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
KNOWN = {
    "apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "images", "namespace"
}  # fmt: skip
CLUSTER_WIDE = ("Namespace",)
# By which field lists of objects are merged; of ports a second one tells.
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
    "volumeMounts": "mountPath", "ports": "port",
}  # fmt: skip
HASH_LETTERS = str.maketrans("013ae", "ghkmt")


class UnknownFeature(Exception):
    """A kustomization uses what this does not know."""


def build(folder: Path) -> list[Object]:
    """All objects of a kustomization, names of generated ConfigMaps with their hashes."""
    objects: list[Object] = []
    keep_name: set[str] = set()
    accumulate(folder, objects, keep_name)
    renamed = {}
    for found in objects:
        if found["kind"] == "ConfigMap" and found.pop("generated", False):
            name = found["metadata"]["name"]
            if name not in keep_name:
                renamed[name] = f"{name}-{name_hash(found)}"
                found["metadata"]["name"] = renamed[name]
    for found in objects:
        rename_references(found, renamed)
    return objects


def accumulate(folder: Path, objects: list[Object], keep_name: set[str]) -> None:
    """Adds what a folder has, and changes what is there already where it is a component."""
    given = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if strange := given.keys() - KNOWN:
        raise UnknownFeature(f"{folder.name}: {sorted(strange)}")
    for name in given.get("resources", ()):
        path = (folder / name).resolve()
        if path.is_dir():
            accumulate(path, objects, keep_name)
        else:
            objects += [found for found in yaml.safe_load_all(path.read_text()) if found]
    for name in given.get("components", ()):
        accumulate((folder / name).resolve(), objects, keep_name)
    for generator in given.get("configMapGenerator", ()):
        generate(folder, generator, objects, keep_name)
    for patch in given.get("patches", ()):
        apply_patch(folder, patch, objects)
    for image in given.get("images", ()):
        if image.keys() != {"name", "newTag"}:
            raise UnknownFeature(f"image {image}")
        for container in containers_of(objects):
            if container["image"].rpartition(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    if "namespace" in given:
        for found in objects:
            if found["kind"] in CLUSTER_WIDE:
                found["metadata"]["name"] = given["namespace"]
            else:
                found["metadata"]["namespace"] = given["namespace"]


def containers_of(objects: list[Object]) -> Iterator[Object]:
    for found in objects:
        pod = found.get("spec", {}).get("template", {}).get("spec", {})
        yield from pod.get("initContainers", ())
        yield from pod.get("containers", ())


def generate(folder: Path, generator: Object, objects: list[Object], keep_name: set[str]) -> None:
    if strange := generator.keys() - {"name", "behavior", "literals", "envs", "files", "options"}:
        raise UnknownFeature(f"ConfigMap generator: {sorted(strange)}")
    data: dict[str, str] = {}
    for file in generator.get("files", ()):
        data[Path(file).name] = (folder / file).read_text()
    lines = [line for file in generator.get("envs", ()) for line in (folder / file).read_text().splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    for line in [*lines, *generator.get("literals", ())]:
        name, _, value = line.partition("=")
        data[name] = value
    name, options = generator["name"], generator.get("options", {})
    if options.get("disableNameSuffixHash"):
        keep_name.add(name)
    if generator.get("behavior") == "merge":
        (old,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == name)
        old["data"] |= data
    else:
        metadata: Object = {"name": name}
        if "labels" in options:
            metadata["labels"] = options["labels"]
        objects.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data, "generated": True}
        )


def name_hash(config_map: Object) -> str:
    """kustomize's: of the JSON form as Go writes it, its name left empty, ten digits that spell no words."""
    content = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(HASH_LETTERS)


def rename_references(node: Any, renamed: dict[str, str]) -> None:
    """Where a pod names a ConfigMap."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("configMapRef", "configMapKeyRef", "configMap") and value.get("name") in renamed:
                value["name"] = renamed[value["name"]]
            rename_references(value, renamed)
    elif isinstance(node, list):
        for value in node:
            rename_references(value, renamed)


def apply_patch(folder: Path, patch: Object, objects: list[Object]) -> None:
    if "path" in patch:
        content = yaml.safe_load((folder / patch["path"]).read_text())
        wanted = (content["kind"], content["metadata"]["name"])
        (target,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == wanted)
        merge_into(target, content)
        return
    if patch.keys() != {"target", "patch"} or patch["target"].keys() != {"kind", "name"}:
        raise UnknownFeature(f"patch {sorted(patch)}")
    wanted = (patch["target"]["kind"], patch["target"]["name"])
    for target in objects:
        if (target["kind"], target["metadata"]["name"]) == wanted:
            for operation in yaml.safe_load(patch["patch"]):
                apply_operation(target, operation)


def apply_operation(target: Any, operation: Object) -> None:
    """One of JSON patch."""
    *way, last = operation["path"].removeprefix("/").split("/")
    for part in way:
        target = target[int(part)] if isinstance(target, list) else target[part]
    kind, value = operation["op"], operation.get("value")
    if kind == "remove":
        del target[last]
    elif kind == "add" and last == "-":
        target.append(value)
    elif kind == "add" or (kind == "replace" and last in target):
        target[last] = value
    else:
        raise UnknownFeature(f"JSON patch {operation}")


def merge_into(target: Object, patch: Object) -> None:
    """A strategic merge: null deletes, lists of named things are merged by name, others replaced. Where new
    entries of such a list stand is not kustomize's order; Kubernetes gives it no meaning but for init
    containers, of which each overlay has one."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            merge_into(target[name], value)
        elif isinstance(value, list) and name in MERGE_KEYS and name in target:
            key, added = MERGE_KEYS[name], []
            for entry in value:
                same = [old for old in target[name] if old[key] == entry[key]]
                if same:
                    merge_into(same[0], entry)
                else:
                    added.append(without_nulls(entry))
            target[name] = added + target[name]
        else:
            target[name] = without_nulls(value)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return copy.deepcopy(value)
