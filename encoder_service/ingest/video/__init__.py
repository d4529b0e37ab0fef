"""Clips: container checks, decoding through PyAV and Pillow, sampling into pieces for the tower."""
