"""``python -m encoder_service``: the same as ``vision-encoder``."""

from encoder_service.cli import main

if __name__ == "__main__":
    main()
