"""Byte layouts that the service writes and its clients read: control page, directory, keys, broker frames.

Each layout exists here once, with the standard library alone. The service (``encoder_service.store``) owns
the writers, the adapter (``lm_adapter.shm``) owns the readers.
"""

LAYOUT_VERSION = 2
"""Of the control page and the directory. A reader of another version asks for inline rows instead."""
