"""From rows to a prefill, for engines of one's own: placeholders, splice, positions, ids of cached prefixes.

Nothing here calls the encoder or imports an engine.
"""
