"""What the plugins of vLLM and SGLang share.

- ``settings``        the encoder's address, TLS, transports and time limits
- ``images``          undecoded files and the facts of their headers
- ``encoder_thread``  calls to the encoder on a thread of its own, with retries
- ``geometry``        the rows that a language model takes
- ``error_text``      HTTP statuses and texts of failures

Nothing here imports an engine.
"""
