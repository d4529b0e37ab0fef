"""The families that ``make-checkpoint`` writes, by name. Imports no other module, because the command line
lists them at its start.

``synthetic/files.py`` has the files and sizes of each.
"""

import enum


class Family(enum.StrEnum):
    QWEN3_VL = "qwen3_vl"
    QWEN3_5 = "qwen3_5"
    KIMI_K25 = "kimi_k25"


FAMILIES: tuple[str, ...] = tuple(family.value for family in Family)
