"""The configuration and processor files of releases (``tests/data/published``; sources are in SOURCES.md)."""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parent / "data" / "published"
MODELS = sorted(folder.name for folder in PUBLISHED.iterdir() if folder.is_dir())
