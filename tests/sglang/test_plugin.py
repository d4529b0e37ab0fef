"""The plugin in a real SGLang: tokens, caches, positions, and what fails.

One server for each family, with its rows from the session's encoder; at that encoder's address there are
made-up ones in turn.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import json
import logging
import random
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import HTTPException
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoProcessor

import encoder_service
from bench.harness.engine_checkpoints import INDEX, TOWER_PREFIXES, write_checkpoint
from bench.harness.ports import free_port
from bench.harness.processes import environment
from bench.harness.sglang import (
    FORKED,
    LANGUAGE_MODEL,
    Encoder,
    Sglang,
    language_model_arguments,
    plugin_variables,
)
from bench.harness.waiting import wait_until
from encoder_service.checkpoints.synthetic import config_for
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.types import PreprocessOptions
from lm_adapter import DigestItem, ItemFailed, VisionEncoderClient
from lm_adapter.engines.sglang.families import image_marks
from lm_adapter.engines.sglang.prompt import with_image_sizes
from lm_adapter.engines.shared.checkpoint import read_config, vision_interface
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.grid_rule import grid_rule
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.prompt import ImagePrompt
from lm_adapter.engines.shared.rows import RowReader
from lm_adapter.items import Grid
from lm_adapter.testing import Fault
from tests.engines.faults import FAULTS, OTHER_MODELS, answer_to, in_place_of, new_picture, script_for
from tests.engines.pictures import data_url
from tests.engines.stack import TIMEOUT_S
from tests.published import MODELS, PUBLISHED
from tests.sglang.conftest import both_families, running_encoder
from tests.sglang.leaving import ONE, left_during_encode
from tests.sglang.reference import IMAGE, Reference, prompt

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
only_qwen3_vl = pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")

PACKAGE = Path(encoder_service.__file__).parent
PUBLISHED_KIMI = PACKAGE / "checkpoints" / "synthetic" / "published" / "kimi_k25"
TEXT = prompt("Say something about waves.")
# Prompts, and which images they have.
CASES = (
    (ONE, (0,)),
    (prompt("Look at this: ", IMAGE), (1,)),
    (prompt(IMAGE, IMAGE, "Compare the two."), (0, 1)),
    (prompt("First ", IMAGE, " then ", IMAGE, " and ", IMAGE), (2, 0, 2)),
    (TEXT, ()),
)


@pytest.fixture(scope="session")
def plugin(
    family: str, checkpoint: Path, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sglang]:
    environment = plugin_variables(encoder.target, timeout_s=TIMEOUT_S, retry_s=2.0, finite=True)
    folder = tmp_path_factory.mktemp("plugin")
    # Prefill is chunked, and cuts images.
    arguments = [*language_model_arguments(family), "--chunked-prefill-size", "64"]
    if family != "qwen3_vl":
        environment |= FORKED
    with Sglang(checkpoint, folder, arguments, environment) as running:
        yield running


@pytest.fixture
def lives_on(plugin: Sglang) -> Iterator[None]:
    """The server answers text after the test."""
    yield
    assert plugin.is_running
    assert plugin.generate(TEXT, []).status_code == 200


def chat(server: Sglang, image: bytes, **fields: Any) -> httpx.Response:
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": "What is it?"},
    ]
    messages = [{"role": "user", "content": parts}]
    return server.post(
        "/v1/chat/completions",
        {"model": "model", "messages": messages, "max_tokens": 4, "temperature": 0, **fields},
    )


def rejected(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    assert all(word in response.text for word in words), response.text


def test_tokens_are_those_of_transformers(plugin: Sglang, reference: Reference, images: list[bytes]) -> None:
    """Prefill is chunked. The second time with the prefix cache, where there is one."""
    expected = [reference.tokens(text, [images[index] for index in chosen]) for text, chosen in CASES]
    assert len({tuple(tokens) for tokens in expected}) == len(CASES)
    # Rows that are lost or zero give other tokens, also in the tests below.
    assert all(reference.needs_rows(text, [images[index] for index in chosen]) for text, chosen in CASES)
    for _ in range(2):
        for (text, chosen), tokens in zip(CASES, expected, strict=True):
            assert plugin.tokens(text, [images[index] for index in chosen]) == tokens


@both_families
def test_prompts_of_ids_and_several_samples(
    plugin: Sglang, reference: Reference, images: list[bytes]
) -> None:
    """Ids that are expanded already; samples of one prompt; SGLang's own word for an image."""
    text, chosen = CASES[2]
    mine = [images[index] for index in chosen]
    expected = reference.tokens(text, mine)
    assert plugin.tokens(reference.ids(text, mine), mine) == expected
    sampling = {"temperature": 0, "max_new_tokens": len(expected), "ignore_eos": True, "n": 2}
    response = plugin.generate(
        text.replace(IMAGE, "<image>"),
        [],
        # A list of images for each of one prompt.
        image_data=[[data_url(image) for image in mine]],
        sampling_params=sampling,
    )
    assert response.status_code == 200, response.text
    assert [sample["output_ids"] for sample in response.json()] == [expected] * 2


@both_families
def test_text_and_images_at_once(plugin: Sglang, reference: Reference, images: list[bytes]) -> None:
    """Requests of all kinds in the same batches."""
    expected = [reference.tokens(text, [images[index] for index in chosen]) for text, chosen in CASES]
    numbers = [random.randrange(len(CASES)) for _ in range(16)]

    def ask(number: int) -> list[int]:
        text, chosen = CASES[number]
        return plugin.tokens(text, [images[index] for index in chosen])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, numbers)) == [expected[number] for number in numbers]


@both_families
def test_no_tower_is_built(plugin: Sglang, checkpoint: Path) -> None:
    """The module tree has as many parameters as the checkpoint has without its tower."""
    num_parameters = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            num_parameters += sum(
                np.prod(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118 - no mapping
                if not name.startswith(TOWER_PREFIXES)
            )
    (reported,) = re.findall(r"is built without a vision tower: (\d+) parameters", plugin.log)
    assert int(reported) == num_parameters


@both_families
def test_rows_come_through_shared_memory(plugin: Sglang) -> None:
    """Once the client has attached itself, which the first image begins."""
    assert plugin.generate(ONE, [new_picture()[0]]).status_code == 200
    wait_until(lambda: "rows come by host:" in plugin.log)
    assert plugin.generate(ONE, [new_picture()[0]]).status_code == 200


@only_qwen3_vl
def test_p12_a_second_turn_reuses_the_first_images_prefix(plugin: Sglang, reference: Reference) -> None:
    """By content: of another picture of the same size nothing is taken."""
    image, other, added = (new_picture()[0] for _ in range(3))
    turns = f"{ONE}It is a wave.<|im_end|>\n{prompt(IMAGE, 'And this one?')}"
    first = plugin.generate(ONE, [image]).json()
    num_before = len(reference.ids(ONE.partition(IMAGE)[0], [])) + 1
    assert first["meta_info"]["cached_tokens"] <= num_before

    apart = plugin.generate(turns, [other, added]).json()
    assert apart["meta_info"]["cached_tokens"] <= num_before
    second = plugin.generate(turns, [image, added]).json()
    assert second["meta_info"]["cached_tokens"] >= len(reference.ids(ONE, [image])) - 1
    assert reference.needs_rows(turns, [image, added])
    assert second["output_ids"] == reference.tokens(turns, [image, added])
    assert apart["output_ids"] == reference.tokens(turns, [other, added])


def test_positions_are_sglangs_own(checkpoint: Path) -> None:
    """Of prompts of up to three images of any size, also such that end in vision."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    config = read_config(checkpoint)
    interface = vision_interface(config)
    start, end = config["vision_start_token_id"], config["vision_end_token_id"]
    for seed in range(100):
        draw = random.Random(seed)
        grids = [Grid(1, 2 * draw.randint(1, 9), 2 * draw.randint(1, 9)) for _ in range(draw.randint(1, 3))]
        ids = []
        for _ in grids:
            ids += [draw.randrange(500) for _ in range(draw.randint(0, 9))]
            ids += [start, interface.image_placeholder_id, end]
        ids += [draw.randrange(500) for _ in range(draw.randint(0, 9))]
        expanded = ImagePrompt.of(ids, grids, interface)
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=interface.merge_size,
            image_token_id=interface.image_placeholder_id,
            video_token_id=interface.video_placeholder_id,
            vision_start_token_id=start,
            model_type=interface.model_type,
            input_ids=torch.tensor([expanded.ids]),
            image_grid_thw=torch.tensor(grids),
        )
        assert expanded.positions is not None
        assert expanded.positions.prompt.tolist() == positions.squeeze(1).tolist()
        assert expanded.positions.delta == int(delta)


def test_lings_positions_are_sglangs_own() -> None:
    """Its images are centred, and its language model needs a GPU in SGLang."""
    from sglang.srt.configs.bailing_hybrid import BailingMoeV3VLConfig
    from sglang.srt.layers.rotary_embedding.bailing_mrope import BailingMRotaryEmbedding

    config = config_for("ling_vl", "tiny")
    interface = vision_interface(config)
    theirs = BailingMoeV3VLConfig(**config)
    grids = [Grid(1, 6, 10), Grid(1, 2, 2), Grid(1, 40, 2)]
    start, image, end = config["vision_start_token_id"], interface.image_placeholder_id, 5
    for ids in ([start, image, end, 7, start, image, start, image], [1, start, image, end, start, image, 2]):
        sent = grids[: ids.count(image)]
        prompt = ImagePrompt.of(ids, sent, interface)
        positions, delta = BailingMRotaryEmbedding.bailing_3drope_get_input_positions_tensor(
            torch.tensor(prompt.ids), theirs, torch.tensor(sent), None
        )
        assert prompt.positions is not None
        assert prompt.positions.prompt.tolist() == positions.squeeze(1).tolist()
        assert prompt.positions.delta == int(delta)


def test_grids_are_the_processors_own(checkpoint: Path) -> None:
    """From a size alone."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    interface = vision_interface(read_config(checkpoint))
    rule = grid_rule(interface, AutoConfig.from_pretrained(checkpoint), processor)
    draw = random.Random(0)
    for _ in range(20):
        size = draw.randint(20, 600), draw.randint(20, 600)
        inputs = processor.image_processor(images=[Image.new("RGB", size)], return_tensors="pt")
        assert [list(rule(ImageFile(b"", *size)))] == inputs["image_grid_thw"].tolist()


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_vl", "kimi_k3"])
def test_kimis_grids_are_the_services(family: str) -> None:
    """SGLang's rule and ours, with the published settings. Of Kimi-VL SGLang has no rule but the checkpoint's
    code."""
    published = PUBLISHED_KIMI.with_name(family)
    settings = json.loads((published / "preprocessor_config.json").read_text())
    processor = SimpleNamespace(media_processor=None, image_processor=SimpleNamespace(**settings))
    rule = grid_rule(vision_interface(read_config(published)), None, processor)
    service = load_preprocessor(published, family, DecodeLimits(1 << 30, 1 << 30))
    draw = random.Random(0)
    # No side has more patches than Kimi-VL takes.
    for most in [60, 600, 7000 if family == "kimi_vl" else 12000] * 20:
        width, height = draw.randint(1, most), draw.randint(1, most)
        assert (
            rule(ImageFile(b"", width, height)) == service.plan_image(height, width, PreprocessOptions()).grid
        )


def test_kimi_k3s_prompts_are_sglangs_own(tmp_path: Path) -> None:
    """The size of each image is in the prompt, between special tokens."""
    from sglang.srt.multimodal.processors.kimi_k3 import _expand_k3_image_prompt_token_ids
    from transformers import AutoTokenizer

    checkpoint = write_checkpoint(tmp_path / "checkpoint", "kimi_k3")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    interface = vision_interface(read_config(checkpoint))
    images = [ImageFile(b"", 300, 41), ImageFile(b"", 28, 1000)]
    grids = [Grid(1, 4, 22), Grid(1, 72, 2)]
    pad = interface.image_placeholder_id
    ids = [5, pad, 6, 7, pad]
    framed = with_image_sizes(ids, images, pad, tokenizer)
    found = ImagePrompt.of(framed, grids, interface)
    counts, sizes = [22, 36], [(image.width, image.height) for image in images]
    expected = _expand_k3_image_prompt_token_ids(ids, pad, counts, sizes, tokenizer)
    assert found.ids == expected[0].tolist()
    assert found.positions is None
    with pytest.raises(ValueError, match="has 1 placeholders of images, 2 were sent"):
        with_image_sizes([pad], images, pad, tokenizer)


RESOLVE = """
import json, sys
from sglang.srt.models.registry import ModelRegistry
for names in json.loads(sys.argv[1]):
    model, name = ModelRegistry.resolve_model_cls(names)
    print("served", name, model.__module__)
"""


def test_published_configurations_name_classes_of_the_plugin() -> None:
    """By SGLang's registry, in a process of its own, with the documented variables."""
    # SGLang cannot build its class of Intern-S1-Pro.
    models = [model for model in MODELS if model != "Intern-S1-Pro"]
    names = [read_config(PUBLISHED / model)["architectures"] for model in models]
    ended = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(names)],
        env=environment(**plugin_variables("127.0.0.1:1")),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    served = [line for line in ended.stdout.splitlines() if line.startswith("served ")]
    assert served == [f"served {name} lm_adapter.engines.sglang.models" for (name,) in names], ended.stderr


def test_the_images_of_a_failed_request_are_freed_at_once(images: list[bytes], checkpoint: Path) -> None:
    """Not at the next collection of garbage: while the encoder is away, clients may try again and again."""
    from lm_adapter.engines.sglang.processors import FileProcessor
    from lm_adapter.engines.sglang.settings import Settings

    processor, config = AutoProcessor.from_pretrained(checkpoint), AutoConfig.from_pretrained(checkpoint)
    interface, tokenizer = vision_interface(read_config(checkpoint)), processor.tokenizer
    placeholder = tokenizer.convert_ids_to_tokens(interface.image_placeholder_id)
    rule = grid_rule(interface, config, processor)
    freed: list[weakref.ref[ImageFile]] = []

    def grid_of(image: ImageFile) -> Grid:
        freed.append(weakref.ref(image))
        return rule(image)

    no_encoder = Settings(target=f"127.0.0.1:{free_port()}", timeout_s=2.0)
    geometry = Geometry.of_model(SimpleNamespace(hf_config=config, dtype="float32"))
    plugin: Any = object.__new__(FileProcessor)
    vars(plugin).update(
        _interface=interface,
        _grid_of=grid_of,
        _tokenizer=tokenizer,
        _placeholder=placeholder,
        _image_text=placeholder.join(image_marks(interface.model_type)),
        _rows=RowReader(no_encoder, geometry, logging.getLogger(__name__)),
        io_executor=ThreadPoolExecutor(1),
    )
    text = f"What is it? <|vision_start|>{placeholder}<|vision_end|>"

    async def ask() -> None:
        with pytest.raises(HTTPException) as raised:
            await plugin.process_mm_data_async(images[:1], text, SimpleNamespace())
        assert raised.value.status_code == 503
        del raised
        await asyncio.to_thread(wait_until, lambda: [one() for one in freed] == [None])

    gc.disable()
    try:
        asyncio.run(ask())
    finally:
        gc.enable()
        plugin._rows.close()


def test_what_is_an_image(images: list[bytes]) -> None:
    """Also where SGLang runs offline. Rows of a client's own are none."""
    from lm_adapter.engines.sglang.processors import image_file

    opened = Image.open(io.BytesIO(images[0]))
    for form in (images[0], data_url(images[0])):
        assert image_file(form).data == images[0]
    for pixels in (opened, np.asarray(opened), torch.tensor(np.asarray(opened))):
        assert image_file(pixels).size == opened.size
    rows = {"format": "processor_output", "precomputed_embeddings": torch.zeros(1, 1)}
    for refused, words in (
        (rows, "come from the encoder"),
        ("data:image/png;base64,!", "Failed to load image"),
        ({"foo": 1}, "Failed to load image: .* dict"),
        ({"url": None}, "Failed to load image: .* NoneType"),
        (None, "object array"),
    ):
        with pytest.raises(ValueError, match=words):
            image_file(refused)
    with pytest.raises(ValueError, match=r"Failed to load image: .* NoneType"):
        image_file(None, f"sha256:{'0' * 64}")


@pytest.mark.usefixtures("lives_on")
@only_qwen3_vl
def test_p33_what_a_client_may_not_send(plugin: Sglang, images: list[bytes]) -> None:
    rejected(plugin.generate(ONE, [b"no image at all"]), 400, "cannot identify")
    broken, _ = new_picture()
    rejected(plugin.generate(ONE, [broken[: len(broken) // 2]]), 400, "damaged")
    rejected(chat(plugin, broken[: len(broken) // 2], stream=True), 400, "damaged")
    rejected(plugin.generate(ONE, images[:2]), 400, "1 placeholders", "2 items")
    rejected(plugin.generate(TEXT, images[:1]), 400, "placeholders")
    hashes = [f"sha256:{hashlib.sha256(image).hexdigest()}" for image in images[:2]]
    assert plugin.generate(ONE, images[:1], mm_content_hashes=hashes[:1]).status_code == 200
    rejected(plugin.generate(ONE, images[:1], mm_content_hashes=hashes[1:]), 400, *hashes)
    for fields, words in (
        ({"image_data": [data_url(images[0])], "mm_hashes": ["1f"]}, "mm_hashes"),
        ({"video_data": ["data:video/mp4;base64,AAAA"]}, "video_data"),
    ):
        rejected(plugin.generate(ONE, [], **fields), 400, words)


@pytest.mark.usefixtures("lives_on")
@only_qwen3_vl
def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_encoded(
    plugin: Sglang, encoder: Encoder, reference: Reference
) -> None:
    image, digest = new_picture()
    ids = reference.ids(ONE, [image])
    rejected(plugin.generate([*ids, *ids[-1:] * (2048 - len(ids))], [image]), 400, "2048 tokens", "2042")
    with VisionEncoderClient(encoder.target) as client:
        (held,) = client.encode([DigestItem(digest)])
    assert isinstance(held, ItemFailed)


@both_families
@pytest.mark.usefixtures("lives_on")
def test_p32_an_encoder_that_is_killed_and_comes_back(
    plugin: Sglang, encoder: Encoder, reference: Reference, images: list[bytes]
) -> None:
    """Whole answers and streams, of both of SGLang's interfaces; text meanwhile."""
    image, _ = new_picture()
    assert plugin.generate(ONE, [image]).status_code == 200
    encoder.kill()
    try:
        started_s = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            asked = [
                pool.submit(plugin.generate, ONE, [new_picture()[0]]),
                pool.submit(chat, plugin, new_picture()[0]),
                pool.submit(chat, plugin, new_picture()[0], stream=True),
            ]
            streamed = [
                pool.submit(plugin.generate, ONE, [new_picture()[0]], stream=True, **options)
                for options in ({}, {"return_text_in_logprobs": True})
            ]
            text = pool.submit(plugin.tokens, TEXT, [])
            for answer in asked:
                rejected(answer.result(), 503, "UNAVAILABLE")
        assert time.monotonic() - started_s < 2 * TIMEOUT_S
        for stream in streamed:
            event = json.loads(stream.result().text.splitlines()[0].removeprefix("data: "))
            assert event["error"]["code"] == 503
            assert "UNAVAILABLE" in event["error"]["message"]
        assert text.result() == reference.tokens(TEXT, [])
    finally:
        encoder.start()
    assert plugin.tokens(ONE, [image]) == reference.tokens(ONE, [image])


@only_qwen3_vl
@pytest.mark.usefixtures("lives_on")
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_hangs_up_during_the_encode(
    plugin: Sglang, encoder: Encoder, reference: Reference, images: list[bytes], is_stream: bool
) -> None:
    """SGLang ends the encode of a stream. Without one it looks for the client once it has the rows."""
    assert left_during_encode(plugin, [encoder], stream=is_stream) == is_stream
    assert plugin.tokens(ONE, images[:1]) == reference.tokens(ONE, images[:1])
    assert plugin.generate(ONE, [new_picture()[0]]).status_code == 200


@only_qwen3_vl
@pytest.mark.usefixtures("lives_on")
def test_p22_p32_rows_of_a_broken_encoder_fail_their_request_alone(plugin: Sglang, encoder: Encoder) -> None:
    """Each beside one whose rows are right; then encoders of other models, and one that does not answer."""
    image, digest = new_picture()
    with in_place_of(encoder, script_for(digest)) as fake:
        for fault, (status, *words) in FAULTS.items():
            answer = answer_to(fault, fake, lambda image: plugin.generate(ONE, [image]))
            rejected(answer, status, *words)
        for changes, grid, texts in OTHER_MODELS:
            fake.stop()
            fake.script = script_for(digest, grid, **changes)
            fake.start()
            rejected(plugin.generate(ONE, [image]), 502, *texts)

        fake.script.faults[digest] = Fault.HANG
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(plugin.generate, ONE, [image])
            assert plugin.generate(TEXT, []).status_code == 200
            assert not slow.done()
            rejected(slow.result(), 504, "DEADLINE_EXCEEDED")


@pytest.mark.extended
def test_kimis_tokens_are_those_of_transformers(tmp_path: Path, images: list[bytes]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "kimi_k25")
    reference = Reference(checkpoint)
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    question, answer = "<|im_user|>user<|im_middle|>", "<|im_end|><|im_assistant|>assistant<|im_middle|>"
    with (
        running_encoder(checkpoint, tmp_path) as encoder,
        Sglang(checkpoint, tmp_path, LANGUAGE_MODEL, plugin_variables(encoder.target)) as server,
    ):
        assert "is built without a vision tower" in server.log
        for text, sent in (
            ("What is a wave?", []),
            (f"{image}What is it?", images[:1]),
            (f"First {image} then {image}", images[1:]),
        ):
            prompt_text = question + text + answer
            assert server.tokens(prompt_text, sent) == reference.tokens(prompt_text, sent)


@pytest.mark.extended
def test_kimi_vls_tokens_are_those_of_transformers(tmp_path: Path, images: list[bytes]) -> None:
    """transformers has no Kimi-VL; of images its Kimi-K2.5 is the same, with the tensors under other names.
    SGLang's own tower has another activation in its projector than the published code."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "kimi_vl")
    reference = Reference(as_kimi_k25(checkpoint, tmp_path / "twin"))
    image = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    question, answer = "<|im_user|>user<|im_middle|>", "<|im_end|><|im_assistant|>assistant<|im_middle|>"
    arguments = [*LANGUAGE_MODEL, "--trust-remote-code"]
    with (
        running_encoder(checkpoint, tmp_path) as encoder,
        Sglang(checkpoint, tmp_path, arguments, plugin_variables(encoder.target)) as server,
    ):
        assert "is built without a vision tower" in server.log
        for text, sent in (
            ("What is a wave?", []),
            (f"{image}What is it?", images[:1]),
            (f"First {image} then {image}", images[1:]),
        ):
            prompt_text = question + text + answer
            assert server.tokens(prompt_text, sent) == reference.tokens(prompt_text, sent)


def as_kimi_k25(checkpoint: Path, twin: Path) -> Path:
    """A checkpoint of Kimi-VL as one of Kimi-K2.5."""
    write_checkpoint(twin, "kimi_k25")
    config, of_twin = (json.loads((path / "config.json").read_text()) for path in (checkpoint, twin))
    # On the CPU SGLang has rotary positions of these layers only with a scaling.
    config["text_config"]["rope_scaling"] = of_twin["text_config"]["rope_scaling"]
    of_twin["text_config"] |= config["text_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (twin / "config.json").write_text(json.dumps(of_twin))
    shutil.copy(checkpoint / "tokenizer.json", twin)
    names = {"multi_modal_projector.linear_1": "mm_projector.proj.0"}
    names |= {
        "multi_modal_projector.linear_2": "mm_projector.proj.2",
        "multi_modal_projector": "mm_projector",
    }
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        for name, value in load_file(path).items():
            start = next((start for start in names if name.startswith(start)), "")
            tensors[names.get(start, "") + name.removeprefix(start)] = value
    for path in (*twin.glob("*.safetensors"), twin / INDEX):
        path.unlink()
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    return twin


@pytest.mark.extended
@pytest.mark.parametrize("glm", ["glm4v", "glm_ocr"])
def test_glms_tokens_are_those_of_transformers(glm: str, tmp_path: Path, images: list[bytes]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", glm)
    reference = Reference(checkpoint)
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    test_grids_are_the_processors_own(checkpoint)
    with (
        running_encoder(checkpoint, tmp_path) as encoder,
        Sglang(checkpoint, tmp_path, LANGUAGE_MODEL, plugin_variables(encoder.target)) as server,
    ):
        assert "is built without a vision tower" in server.log
        for text, sent in (
            ("What is a wave?", []),
            (f"{image}What is it?", images[:1]),
            (f"First {image} then {image}", images[1:]),
        ):
            prompt_text = f"[gMASK]<sop><|user|>\n{text}<|assistant|>\n"
            assert server.tokens(prompt_text, sent) == reference.tokens(prompt_text, sent)
            assert not sent or reference.needs_rows(prompt_text, sent)
        refused = server.generate(f"{image}What?", images[:1], video_data=["data:video/mp4;base64,AAAA"])
        assert refused.status_code == 400


@pytest.mark.extended
def test_tokens_of_qwen2_5_are_those_of_transformers(tmp_path: Path, images: list[bytes]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen2_5_vl")
    reference = Reference(checkpoint)
    test_grids_are_the_processors_own(checkpoint)
    with (
        running_encoder(checkpoint, tmp_path) as encoder,
        Sglang(checkpoint, tmp_path, LANGUAGE_MODEL, plugin_variables(encoder.target)) as server,
    ):
        assert "is built without a vision tower" in server.log
        for parts, sent in (
            (("What is a wave?",), []),
            ((IMAGE, "What is it?"), images[:1]),
            ((IMAGE, IMAGE, "Compare the two."), images[1:]),
        ):
            prompt_text = prompt(*parts)
            assert server.tokens(prompt_text, sent) == reference.tokens(prompt_text, sent)
            assert not sent or reference.needs_rows(prompt_text, sent)
