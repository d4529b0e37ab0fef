"""Byte layouts that the service writes and its clients read: control page, directory, keys, broker frames,
varints. Beside them what both have to compute alike: ``items`` the rows of a grid, ``png`` the grid of a PNG,
``host`` the identity of a host.

Each layout is defined once, here, with the standard library only. The service (``encoder_service.store``)
owns the writers, the adapter (``lm_adapter.shm``) the readers.
"""

LAYOUT_VERSION = 2
"""Version of the control page and the directory. A reader with another version requests inline rows."""
