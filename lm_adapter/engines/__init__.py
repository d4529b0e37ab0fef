"""Language-model engines fed with rows: one module per engine. Nothing is imported before it is asked for.

An engine makes five calls, in this order. ``hf_driver`` is the example; ``docs/positions.md`` shows each.

1. ``client.encode(items)``, or ``fetch(keys)`` where another process sent the items: rows and grids.
2. ``placeholders.expand_placeholders(ids, [prompt_item(grid, ...), ...])``: the ids with one placeholder
   for each row, and the spans of each item's rows.
3. ``mrope.mrope_positions(prompt, grids)``, or ``plain_positions`` for families without M-RoPE; of these
   ``chunk(start, end)`` for a prefill step and ``decode(index)`` after it.
4. ``splice.Splicer(prompt.spans, rows, layout)``: checks all rows once, before any step runs.
5. ``splice.splice_step(inputs_embeds, chunks)`` in each prefill step, then ``splicer.drop_before(end)``.

Some engines need more: ``clip_texts`` for the timestamps between a clip's frames, before the second call;
``prefix_cache`` for ids that differ by content; ``rotary`` to apply M-RoPE. An engine that splices by itself,
as vLLM does from its encoder cache, makes the first call alone and checks the rows with ``check_rows``.
"""
