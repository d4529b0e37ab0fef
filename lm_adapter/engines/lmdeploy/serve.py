"""``lmdeploy serve`` with the plugin: ``python -m lm_adapter.engines.lmdeploy.serve api_server MODEL ...``.

A module of its own and not the package's ``__main__``: Python imports it again in processes that LMDeploy
spawns, among them the engine's.
"""

from __future__ import annotations

import os
import sys

from lm_adapter.engines.lmdeploy import install
from lm_adapter.engines.lmdeploy.interfaces import logger
from lm_adapter.engines.lmdeploy.settings import Settings
from lm_adapter.engines.shared.first_contact import start_of
from lm_adapter.errors import EncoderError


def main() -> None:
    with start_of(Settings.ENGINE, logger):
        Settings.of_variable(os.environ)  # before LMDeploy is imported, which takes long
    install()
    from lmdeploy.cli import run

    sys.argv[1:1] = ["serve"]
    run()


try:
    if __name__ == "__main__":
        main()
    else:
        install()
except EncoderError:
    sys.exit(1)  # the reason has been logged
