"""What the plugins of vLLM, SGLang and LMDeploy share.

- ``settings``        the encoder's address, TLS, transports and time limits
- ``images``          undecoded files and the facts of their headers
- ``agreement``       whether an encoder serves the rows that a model takes
- ``first_contact``   an engine's first question to the encoder, at its start
- ``encoder_thread``  calls to the encoder on a thread of its own, with retries
- ``geometry``        the rows that a language model takes
- ``interfaces``      which versions of an engine a plugin takes
- ``grid_rule``       an image's grid by its size
- ``prompt``          a prompt's ids with placeholders, the offsets of its images, M-RoPE positions
- ``rows``            fetches and checks a request's rows; limits their bytes
- ``rank_socket``     orders to the processes that compute, to read rows, and their reports
- ``rank_reader``     reads and checks rows in such a process
- ``error_text``      HTTP statuses and texts of failures

Nothing here imports an engine.
"""
