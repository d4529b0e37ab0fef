"""SGLang 0.5.23 without its vision tower: a plugin, fed by the service.

``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`` and ``SGLANG_EXTERNAL_MODEL_PACKAGE`` name this package; SGLang
imports its modules, in each of its processes. ``docs/sglang.md`` has the command line. An image passes the
modules in this order:

- ``processors``  in the tokenizer's process: the undecoded file, and the prompt's ids
- ``rows``        fetches rows from the encoder, on a thread of its own, and checks them
- ``prompt``      placeholders, their offsets, and M-RoPE positions
- ``models``      in each rank: SGLang's model classes without a tower, which get the rows with the request

Everything that can fail, fails in ``processors``, before SGLang's scheduler gets the request.
``settings`` has the settings.
"""
