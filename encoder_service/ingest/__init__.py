"""Ingest: digests and keys, image files to uint8 frames, frames to patches, callers' own tensors."""
