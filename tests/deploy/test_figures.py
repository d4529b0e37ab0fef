"""The figures of docs/deploy.md are those of the result files and of the manifests."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from encoder_service.towers.synthetic import configs
from tests.deploy.rendering import built, named, quantity

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deploy.md").read_text()
(NAME,) = re.findall(r"<!-- figures: (\S+tower-\S+) -->", TEXT)
RESULT = json.loads((ROOT / NAME).read_text())
FAMILIES = {"Qwen3-VL": "qwen3_vl", "Qwen3.5": "qwen3_5", "Kimi-K2.5": "kimi_k25"}
NUM_IMAGES = {"1x448": 1, "32x448": 32, "1x1024": 1, "8x1024": 8, "mixed": 36}


def median_ms(family: str, case: str) -> float:
    (found,) = (
        one["median_ms"]
        for one in RESULT["records"]
        if (one["family"], one["case"], one["variant"]) == (family, case, "graph")
    )
    return float(found)


def held_ms(family: str, case: str) -> float:
    (found,) = (
        one["sustained_ms"]
        for one in RESULT["power"]["records"]
        if (one["family"], one["case"], one["variant"]) == (family, case, "graph")
    )
    return float(found)


def test_images_a_second_are_those_of_the_result() -> None:
    rows = re.findall(r"^\| (Qwen3-VL|Qwen3\.5|Kimi-K2\.5) \| (.+) \|$", TEXT, re.MULTILINE)
    assert [label for label, _ in rows] == list(FAMILIES)
    for label, cells in rows:
        family = FAMILIES[label]
        times_ms = [
            ("1x448", median_ms(family, "1x448")),
            ("32x448", median_ms(family, "32x448")),
            ("32x448", held_ms(family, "32x448")),
            ("1x1024", median_ms(family, "1x1024")),
            ("8x1024", median_ms(family, "8x1024")),
            ("8x1024", held_ms(family, "8x1024")),
            ("mixed", median_ms(family, "mixed")),
        ]
        assert cells.split(" | ") == [str(round(NUM_IMAGES[case] * 1000 / ms)) for case, ms in times_ms]


def image_ms(case: str) -> float:
    return held_ms("qwen3_vl", case) / NUM_IMAGES[case]


def test_what_is_said_of_sizes_follows() -> None:
    assert f"{64**2 / 28**2:.1f} times the patches" in TEXT
    assert f"takes {image_ms('8x1024') / image_ms('32x448'):.1f} times as long" in TEXT
    singles = f"{median_ms('qwen3_vl', '1x448'):.2f} ms and {median_ms('qwen3_vl', '1x1024'):.2f} ms"
    assert f"low rate take {singles}" in TEXT


def encoders(encodes: float, *shares: tuple[str, float]) -> tuple[float, float]:
    """(images a second of one GPU, GPUs needed before rounding)"""
    rate = 1000 / sum(share * image_ms(case) for case, share in shares)
    return rate, encodes / (0.75 * rate)


def test_the_worked_example_follows_from_the_formula_and_the_result() -> None:
    example = " ".join(TEXT[TEXT.index("**A worked example.**") :].split("\n\n")[0].split())
    replicas, requests, images = 64, 8, 1.5
    encodes = replicas * requests * images * (1 - 0.3)
    rate, needed = encoders(encodes, ("32x448", 0.5), ("8x1024", 0.5))
    for text in (
        f"{replicas} LM replicas of Qwen3-VL, each with {requests} image requests a second of {images} "
        f"images: {replicas * requests * images:.0f} images a second.",
        f"30 % of them are asked for again: {encodes:.0f} encodes a second.",
        f"held rates: {rate:.0f} images a second for one GPU.",
        f"{encodes:.0f} / (0.75 * {rate:.0f}) is {needed:.1f}, so {math.ceil(needed)}, and one more: "
        f"{math.ceil(needed) + 1} encoders for {replicas} LM replicas.",
    ):
        assert text in example, text
    large, small = (math.ceil(encoders(encodes, (case, 1.0))[1]) + 1 for case in ("8x1024", "32x448"))
    assert (
        f"With all images at 1024 pixels it would be {large}, with all at 448 it would be {small}." in example
    )


def test_the_formulas_target_is_the_autoscalers() -> None:
    metric = named(built("gpu"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    target = quantity(metric["target"]["averageValue"])
    assert f"encodes / ({target:g} * rate)" in TEXT
    assert f"`ve_saturation_ratio` ({target:g})" in TEXT


@pytest.mark.parametrize(
    ("label", "width", "levels"),
    [
        ("Qwen3-VL", configs.QWEN3_VL_LANGUAGE["full"].hidden_size, len(configs.DEEPSTACK_LEVELS["full"])),
        ("Qwen3.5", configs.QWEN3_5_LANGUAGE["full"].hidden_size, 0),
        ("Kimi-K2.5", configs.KIMI_LANGUAGE["full"].hidden_size, 0),
    ],
)
def test_rows_of_a_large_image_are_as_large_as_said(label: str, width: int, levels: int) -> None:
    mib = 64**2 // 4 * 2 * width * (1 + levels) / 2**20
    flat = " ".join(TEXT.split())
    assert f"{mib:g} MiB for {label}" in flat
    if levels:
        rate = 1000 / image_ms("8x1024")
        assert f"encodes {rate:.0f} of them a second sends {rate * mib / 1024:.1f} GiB a second" in flat
        assert f"where rows go inline, {rate * mib * 2**20 * 8 / 1e9:.0f} Gbit/s" in flat


def test_graphs_take_what_is_said() -> None:
    (graphs,) = (
        one for one in RESULT["captures"] if (one["family"], one["variant"]) == ("qwen3_vl", "graph")
    )
    assert f"graphs ({graphs['captured_bytes'] / 2**30:.1f} GiB for Qwen3-VL's default ladder)" in TEXT
    comment = (ROOT / "deploy" / "k8s" / "components" / "gpu" / "deployment.yaml").read_text()
    assert f"took {graphs['seconds']:.0f} s on an H200" in comment


def test_times_of_a_stop_are_the_manifests() -> None:
    flat = " ".join(TEXT.split())
    pod = named(built("gpu"), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 5
    assert "five seconds pass" in flat
    assert f"the pod's grace period, {pod['terminationGracePeriodSeconds']} s" in flat
    data = next(each["data"] for each in built("gpu") if each["kind"] == "ConfigMap")
    assert f"`VE_DRAIN_GRACE_S` ({data['VE_DRAIN_GRACE_S']} s)" in flat


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "docs" / "deploy.md", ROOT / "deploy" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), target
