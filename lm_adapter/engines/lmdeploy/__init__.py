"""LMDeploy 0.18 without its vision tower: a plugin for its PyTorch engine, fed by the service.

LMDeploy has no plugin interface. ``install`` replaces the names in LMDeploy that ``interfaces`` lists, in the
API server and in the engine's process. ``docs/lmdeploy.md`` has the command line. An image passes the modules
in this order:

- ``serve``       starts LMDeploy with the plugin; LMDeploy's engine process imports it again
- ``media``       API server: an image stays an undecoded file
- ``encoder``     API server: the prompt's ids, the answer without rows
- ``orders``      API server: the encoder encodes, the engine's process reads; handles of rows
- ``server``      API server: what cannot work ends the start; rows are kept until the engine has them
- ``rank``        engine's process: reads and checks rows, onto the GPU or the host
- ``engine``      engine's process: requests get their rows; names the model classes
- ``module_map``  each rank: the file by which LMDeploy finds the model classes
- ``models``      each rank: LMDeploy's model classes without a tower

Every failure of a request comes to ``encoder``, before the engine gets the request: an exception there
would end it for good. ``settings`` reads the settings.
"""

from __future__ import annotations

import functools


@functools.cache
def install() -> None:
    """Replaces LMDeploy's names in this process. A script that uses ``lmdeploy.pipeline`` calls it at its top
    level, where processes that LMDeploy spawns run it too. Raises InvalidRequest for a version of LMDeploy
    that differs."""
    import lmdeploy

    from lm_adapter.engines.lmdeploy.interfaces import INTERFACES, logger
    from lm_adapter.engines.lmdeploy.settings import Settings
    from lm_adapter.engines.shared.first_contact import start_of
    from lm_adapter.errors import InvalidRequest

    with start_of(Settings.ENGINE, logger):
        if reason := INTERFACES.refusal(lmdeploy.__version__):
            raise InvalidRequest(reason)
    from lm_adapter.engines.lmdeploy import engine, server

    server.install()
    engine.install()
