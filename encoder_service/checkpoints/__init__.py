"""Checkpoint folders. ``hub`` fetches published ones, ``synthetic`` writes random ones in their layout."""
