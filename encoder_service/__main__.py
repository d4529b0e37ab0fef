"""The console script ``vision-encoder``, and ``python -m encoder_service``.

Owns what an installation without the extra ``serve`` answers: the base has the client library alone, and
every command needs more.
"""

import sys

from encoder_service.errors import missing_module


def main() -> None:
    """Runs the command line. Ends with one sentence where a package is missing."""
    try:
        from encoder_service.cli import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(f"vision-encoder: {missing_module(error)}")


if __name__ == "__main__":
    main()
