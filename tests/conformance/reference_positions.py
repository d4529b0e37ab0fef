"""Vectors of positions, deltas, resumed positions and spliced rows, from the reference package's model.

Owns their cases; positions are ``get_rope_index``'s of Qwen3-VL and Qwen3.5, which have to agree, rows what
``Qwen3VLModel.forward`` hands to its language model.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from tests.conformance.reference_processors import module
from tests.conformance.vectors import Case, Vectors

IMAGE_ID, VIDEO_ID, MERGE_SIZE = 151_655, 151_656, 2
PLACEHOLDERS = {"image_placeholder_id": IMAGE_ID, "video_placeholder_id": VIDEO_ID, "merge_size": MERGE_SIZE}
Grid = tuple[int, int, int]
Part = tuple[str, Any]  # ("text", how many ids), ("image", grid), ("video", grid)

NAMED: dict[str, list[Part]] = {
    "text alone": [("text", 5)],
    "one picture": [("text", 2), ("image", (1, 4, 6)), ("text", 3)],
    "a picture first": [("image", (1, 4, 4)), ("text", 1)],
    "ends in a wide picture": [("text", 3), ("image", (1, 2, 12))],
    "ends in a tall picture": [("text", 3), ("image", (1, 12, 2))],
    "ends in a clip": [("text", 1), ("video", (3, 4, 6))],
    "three pictures of different grids": [
        ("text", 1), ("image", (1, 2, 8)), ("text", 1), ("image", (1, 8, 2)), ("text", 1),
        ("image", (1, 6, 6)),
    ],
    "a clip between pictures": [
        ("text", 2), ("image", (1, 4, 4)), ("text", 2), ("video", (2, 4, 6)), ("text", 2),
        ("image", (1, 2, 2)), ("text", 2),
    ],
    "pictures between clips": [
        ("text", 1), ("video", (4, 2, 2)), ("text", 3), ("image", (1, 6, 4)), ("text", 1),
        ("video", (1, 4, 4)),
    ],
}  # fmt: skip


class Prompt:
    """An expanded prompt: ids, and its items in prompt order. A clip has a timestamp's text and the vision
    start id before the rows of every temporal patch."""

    def __init__(self, parts: list[Part], rng: random.Random) -> None:
        self.ids: list[int] = []
        self.items: list[dict[str, Any]] = []
        for kind, what in parts:
            if kind == "text":
                self.ids += [rng.randrange(1000) for _ in range(what)]
                continue
            t, h, w = what
            self.items.append({"modality": kind, "grid": [t, h, w]})
            for _ in range(t):
                if kind == "video":
                    self.ids += [rng.randrange(1000) for _ in range(rng.randrange(1, 4))]
                    self.ids.append(151_652)
                rows = h * w // MERGE_SIZE**2
                self.ids += [IMAGE_ID if kind == "image" else VIDEO_ID] * rows

    def grids(self, modality: str) -> torch.Tensor | None:
        found = [item["grid"] for item in self.items if item["modality"] == modality]
        return torch.tensor(found) if found else None


def prompts() -> dict[str, Prompt]:
    rng = random.Random(1234)
    made = {name: Prompt(parts, rng) for name, parts in NAMED.items()}
    for number in range(16):
        parts: list[Part] = [("text", rng.randrange(1, 5))]
        for _ in range(rng.randrange(1, 4)):
            height, width = 2 * rng.randrange(1, 5), 2 * rng.randrange(1, 5)
            if rng.random() < 0.5:
                parts.append(("image", (1, height, width)))
            else:
                parts.append(("video", (rng.randrange(1, 4), height, width)))
            if rng.random() < 0.8 or parts[-1][0] == "image":
                parts.append(("text", rng.randrange(1, 4)))
        made[f"random {number}"] = Prompt(parts, rng)
    return made


def rope_index(prompt: Prompt, more: list[int]) -> tuple[list[list[int]], int]:
    """Positions and delta of the prompt with text behind it; both families'."""
    ids = torch.tensor([prompt.ids + more])
    results = []
    for family, name in (("qwen3_vl", "Qwen3VLModel"), ("qwen3_5", "Qwen3_5Model")):
        model_class = getattr(module(f"{family}.modeling_{family}"), name)
        model = SimpleNamespace(
            config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE_SIZE))
        )
        model.get_vision_position_ids = model_class.get_vision_position_ids.__get__(model)
        positions, delta = model_class.get_rope_index(
            model,
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int(),
            image_grid_thw=prompt.grids("image"),
            video_grid_thw=prompt.grids("video"),
        )
        results.append((positions[:, 0].tolist(), int(delta)))
    assert results[0] == results[1], "the families' positions differ"
    return results[0]


def positions() -> Vectors:
    cases = []
    for name, prompt in prompts().items():
        found, delta = rope_index(prompt, [])
        asked = {"ids": prompt.ids, "items": prompt.items, **PLACEHOLDERS}
        cases.append(Case("positions", name, asked, {"positions": found, "delta": delta}))
    return Vectors("positions", "get_rope_index of Qwen3VLModel and Qwen3_5Model", tuple(cases))


def resumed_positions() -> Vectors:
    """A sequence that is taken up again at ``start``: after a retraction with what was generated, or behind a
    prefix-cache hit, which may end inside a vision run."""
    rng = random.Random(99)
    cases = []
    for name, prompt in prompts().items():
        num_generated = 0 if name.startswith("ends in") else rng.choice([0, 1, 5])
        whole, _ = rope_index(prompt, [7] * num_generated)
        total = len(prompt.ids) + num_generated
        visual = [n for n, token in enumerate(prompt.ids) if token in (IMAGE_ID, VIDEO_ID)]
        starts = {rng.randrange(total), *([rng.choice(visual)] if visual else [])}
        for start in sorted(starts):
            asked = {
                "ids": prompt.ids, "items": prompt.items, **PLACEHOLDERS,
                "num_generated": num_generated, "start": start,
            }  # fmt: skip
            expected = {
                "positions": [axis[start:] for axis in whole],
                "next_position": max(map(max, whole)) + 1,
            }
            cases.append(Case("resumed_positions", f"{name}, from {start}", asked, expected))
    return Vectors("resumed_positions", "get_rope_index of the whole sequence", tuple(cases))


OUT_WIDTH, NUM_LEVELS = 2, 2


def row_values(item: int, row: int) -> list[float]:
    """Element c of row r of item i is 10000 i + 10 r + c, i from 1: exact in float32."""
    return [float(10_000 * (item + 1) + 10 * row + c) for c in range(OUT_WIDTH * (1 + NUM_LEVELS))]


def spliced(prompt: Prompt) -> tuple[list[list[float]], list[bool], list[list[list[float]]]]:
    """What the reference hands to its language model: inputs_embeds [N, D], the mask, the levels [V, D].
    Before the splice, token n's embedding is -(n + 1) throughout."""
    modeling = module("qwen3_vl.modeling_qwen3_vl")
    rows: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    for index, item in enumerate(prompt.items):
        t, h, w = item["grid"]
        count = t * h * w // MERGE_SIZE**2
        rows[item["modality"]].append(torch.tensor([row_values(index, row) for row in range(count)]))
    seen: dict[str, Any] = {}
    outputs = module("qwen3_vl.modeling_qwen3_vl").BaseModelOutputWithPast(last_hidden_state=torch.zeros(1))

    def features(modality: str) -> Any:
        levels = [
            [item[:, (n + 1) * OUT_WIDTH : (n + 2) * OUT_WIDTH] for item in rows[modality]]
            for n in range(NUM_LEVELS)
        ]
        return SimpleNamespace(
            pooler_output=[item[:, :OUT_WIDTH] for item in rows[modality]], deepstack_features=levels
        )

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return -torch.arange(1.0, ids.shape[1] + 1)[None, :, None].expand(1, -1, OUT_WIDTH)

    model = SimpleNamespace(
        config=SimpleNamespace(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, return_dict=True),
        get_input_embeddings=lambda: embed,
        get_image_features=lambda *_, **__: features("image"),
        get_video_features=lambda *_, **__: features("video"),
        compute_3d_position_ids=lambda **_: None,
        language_model=lambda **given: seen.update(given) or outputs,
    )
    model.get_placeholder_mask = modeling.Qwen3VLModel.get_placeholder_mask.__get__(model)
    modeling.Qwen3VLModel.forward(
        model,
        input_ids=torch.tensor([prompt.ids]),
        pixel_values=torch.zeros(1) if rows["image"] else None,
        pixel_values_videos=torch.zeros(1) if rows["video"] else None,
        return_dict=True,
    )
    mask = seen["visual_pos_masks"]
    levels = seen["deepstack_visual_embeds"]
    return (
        seen["inputs_embeds"][0].tolist(),
        [False] * len(prompt.ids) if mask is None else mask[0].tolist(),
        [[]] * NUM_LEVELS if levels is None else [level.tolist() for level in levels],
    )


def splice() -> Vectors:
    """Windows of a chunked prefill, cut out of what the reference does with the whole prompt."""
    rng = random.Random(5)
    cases = []
    for name, prompt in prompts().items():
        embeds, mask, levels = spliced(prompt)
        total = len(prompt.ids)
        cut = rng.randrange(total + 1)
        for start, end in {(0, total), (0, cut), (cut, total)}:
            if start == end:
                continue
            first, last = sum(mask[:start]), sum(mask[:end])
            asked = {
                "ids": prompt.ids, "items": prompt.items, **PLACEHOLDERS,
                "out_width": OUT_WIDTH, "num_deepstack_levels": NUM_LEVELS, "start": start, "end": end,
            }  # fmt: skip
            expected = {
                "inputs_embeds": embeds[start:end],
                "visual_mask": mask[start:end],
                "deepstack": [level[first:last] for level in levels],
            }
            cases.append(Case("splice", f"{name}, tokens {start} to {end}", asked, expected))
    cases.sort(key=lambda case: case.name)
    return Vectors("splice", "Qwen3VLModel.forward, what it hands to the language model", tuple(cases))


def all_vectors() -> list[Vectors]:
    return [positions(), resumed_positions(), splice()]
