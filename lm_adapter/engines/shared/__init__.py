"""What the plugins of vLLM and SGLang share.

- ``settings``        the encoder's address, TLS, transports and time limits
- ``images``          undecoded files and the facts of their headers
- ``agreement``       whether an encoder serves the rows that a model takes
- ``first_contact``   an engine's first question to the encoder, at its start
- ``encoder_thread``  calls to the encoder on a thread of its own, with retries
- ``geometry``        the rows that a language model takes
- ``error_text``      HTTP statuses and texts of failures

Nothing here imports an engine.
"""
