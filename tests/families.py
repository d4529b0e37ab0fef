"""The families of tests that run a whole service or a whole model.

They stand for all: rows with deepstack levels and without, positions on three axes and on one, frames that
keep their rows and frames that are averaged. Tests of checkpoints, towers and processors have every family.
"""

REPRESENTATIVE = ("qwen3_vl", "qwen3_5", "kimi_k25")
