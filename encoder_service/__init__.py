"""Vision encoder service: images in, visual tokens out, addressed by content."""

__version__ = "0.1.0"
