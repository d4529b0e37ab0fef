"""From rows to a prefill, for engines without a plugin: placeholders, splice, positions, pad ids.

Nothing here calls the encoder or imports an engine.
"""
