"""SGLang 0.5.23 without its vision tower: a plugin, fed by the service.

``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`` and ``SGLANG_EXTERNAL_MODEL_PACKAGE`` name this package; SGLang
imports its modules in each of its processes. ``docs/sglang.md`` has the command line. An image passes the
modules in this order:

- ``processors``  in the tokenizer's process: reads the file, undecoded, and the prompt's ids
- ``prompt``      SGLang's own word for an image
- ``models``      in each rank: SGLang's model classes without a tower; a request brings its rows along

Every failure of a request happens in ``processors``, before SGLang's scheduler gets the request. ``settings``
reads the settings, ``families`` names the models.
"""
