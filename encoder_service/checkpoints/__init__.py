"""Checkpoint folders. ``synthetic`` writes random ones in the layout of the published ones."""
