"""An engine of one's own: one prompt with one image, prefilled in chunks and decoded greedily.

    python examples/own_engine.py MODEL IMAGE [--server 127.0.0.1:50051]

MODEL is a folder with Qwen3-VL's config.json and weights; the service serves the same model. Prints tokens.
``lm_adapter.prefill`` has what is particular to images: placeholders, splice and M-RoPE. The language model
is that of transformers, and could be any.
"""

import argparse
import inspect
from typing import Any

import torch
from transformers import DynamicCache

from lm_adapter import EncodedRows, ImageItem, Modality, VisionEncoderClient
from lm_adapter.engines.hf import load_language_model
from lm_adapter.prefill.mrope import mrope_positions
from lm_adapter.prefill.placeholders import expand_placeholders, prompt_item
from lm_adapter.prefill.splice import RowsLayout, Splicer, StepChunk, splice_step

CHUNK_SIZE = 64


@torch.no_grad()
def generate(model: Any, head_VD: torch.Tensor, image_id: int, rows: EncodedRows, num_new: int) -> list[int]:
    embed = model.embed_tokens
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {cache_name: DynamicCache()}
    # 1. A prompt has one placeholder for each image; it needs one for each row.
    item = prompt_item(
        rows.grid_thw, placeholder_id=image_id, merge_size=2, modality=Modality.IMAGE, merges_time=False
    )
    prompt = expand_placeholders([11, 22, image_id, 33], [item])
    # 2. Positions on three axes. After the prompt they go on with a delta.
    positions = mrope_positions(prompt, [rows.grid_thw], merge_size=2)
    # 3. Rows are checked against prompt and model before anything runs.
    layout = RowsLayout(embed.embedding_dim, rows.num_deepstack_levels)
    splicer = Splicer(prompt.spans, [rows.torch()], layout, inputs_embeds_dtype=embed.weight.dtype)
    ids = torch.from_numpy(prompt.ids)
    ids[torch.from_numpy(prompt.visual_mask)] = 0  # replaced below
    for start in range(0, len(prompt), CHUNK_SIZE):
        chunk = ids[start : start + CHUNK_SIZE]
        embeds_TD = embed(chunk)
        # 4. The chunk's rows go in place of its placeholders; DeepStack levels go to the first layers.
        spliced = splice_step(embeds_TD, [StepChunk(splicer, start, len(chunk))])
        visual = torch.zeros(1, len(chunk), dtype=torch.bool)
        visual[0, spliced.visual_tokens] = True
        hidden = model(
            inputs_embeds=embeds_TD[None],
            position_ids=torch.from_numpy(positions.chunk(start, start + len(chunk)).copy())[:, None],
            visual_pos_masks=visual,
            deepstack_visual_embeds=[*spliced.deepstack],
            **cache,
        ).last_hidden_state
    tokens: list[int] = []
    for index in range(len(prompt), len(prompt) + num_new):
        tokens.append(int((hidden[0, -1] @ head_VD.T).argmax()))
        position_ids = torch.full((3, 1, 1), positions.decode(index))
        hidden = model(
            inputs_embeds=embed(torch.tensor([tokens[-1:]])), position_ids=position_ids, **cache
        ).last_hidden_state
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("image")
    parser.add_argument("--server", default="127.0.0.1:50051")
    options = parser.parse_args()
    loaded = load_language_model(options.model)  # no tower in memory
    with VisionEncoderClient(options.server) as client:
        rows = client.encode(ImageItem.from_path(options.image))
    print(
        generate(
            loaded.language_model, loaded.head_VD, loaded.interface.image_placeholder_id, rows, num_new=8
        )
    )
