"""Vision encoder service: images in, visual tokens out, addressed by content."""

__version__ = "0.2.0"
