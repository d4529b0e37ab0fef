"""Clips: checks of the container, decoding through PyAV and Pillow, sampling, pieces for the tower."""
