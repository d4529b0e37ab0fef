"""Language-model engines fed with rows: one module per engine. Nothing is imported before it is asked for.

An engine makes five calls, in this order. ``hf_driver`` makes all but the first, which README shows;
``docs/positions.md`` explains the others. The checkpoint's ids and sizes come from
``hf_checkpoint.vision_interface``.

1. ``client.encode(items)``, or ``fetch(keys)`` where another process sent the items: rows and grids.
2. ``placeholders.expand_placeholders(ids, [prompt_item(grid, placeholder_id=..., merge_size=...,
   modality=..., merges_time=...), ...])``: the ids with one placeholder for each row, and the spans of each
   item's rows.
3. ``mrope.mrope_positions(prompt, grids, merge_size=...)``, or ``plain_positions`` for families without
   M-RoPE; of these ``chunk(start, end)`` for a prefill step and ``decode(index)`` after it.
4. ``splice.Splicer(prompt.spans, rows, layout, inputs_embeds_dtype=...)``: checks all rows once, before any
   step runs.
5. ``splice.splice_step(inputs_embeds, [StepChunk(splicer, start, num_tokens), ...])`` in each prefill step,
   then ``splicer.drop_before(end)``.

Some engines need more: ``clip_texts`` for the timestamps between a clip's frames, before the second call;
``prefix_cache`` for ids that differ by content; ``rotary`` to apply M-RoPE. An engine that splices by itself,
as vLLM does from its encoder cache, makes the first call alone and checks the rows with ``check_rows``.
"""
