"""Integration of language-model engines, one package per engine. Importing this package imports none of them.

An engine makes five calls, in this order. ``hf.driver`` makes calls 2 to 5; README shows the first, and
``docs/positions.md`` explains the others. ``shared.checkpoint.vision_interface`` reads the checkpoint's ids
and sizes.

1. ``client.encode(items)``, or ``fetch(keys)`` if another process sent the items: returns rows and grids.
2. ``placeholders.expand_placeholders(ids, [prompt_item(grid, placeholder_id=..., merge_size=...,
   modality=..., merges_time=...), ...])``: returns the ids with one placeholder for each row, and the spans
   of each item's rows.
3. ``mrope.mrope_positions(prompt, grids, merge_size=...)``, or ``plain_positions`` for families without
   M-RoPE. ``chunk(start, end)`` of the result serves a prefill step, ``decode(index)`` a decode step.
4. ``splice.Splicer(prompt.spans, rows, layout, inputs_embeds_dtype=...)``: checks all rows once, before any
   step runs.
5. ``splice.splice_step(inputs_embeds, [StepChunk(splicer, start, num_tokens), ...])`` in each prefill step,
   then ``splicer.drop_before(end)``.

Some engines need more: ``clip_texts`` for the timestamps between a clip's frames, before the second call;
``prefix_cache`` for ids that differ by content; ``rotary`` to apply M-RoPE. vLLM, SGLang and LMDeploy
splice rows themselves. vLLM splices from its encoder cache: its plugin makes only the first call, and checks
the rows with ``check_rows``. The plugins of SGLang and LMDeploy make the first two calls, SGLang's also the
third.
"""
