"""The families that ``make-checkpoint`` writes, by name. Imports no other module, because the command line
lists them at its start.

``synthetic/files.py`` has the files and sizes of each.
"""

import enum


class Family(enum.StrEnum):
    QWEN3_VL = "qwen3_vl"
    QWEN3_5 = "qwen3_5"
    KIMI_K25 = "kimi_k25"
    QWEN4_EXP = "qwen4_exp"
    QWEN3_OMNI_MOE = "qwen3_omni_moe"
    INTERNS1_PRO = "interns1_pro"
    INTERN_S2_PREVIEW = "intern_s2_preview"
    KIMI_VL = "kimi_vl"
    KIMI_K3 = "kimi_k3"
    GLM4V = "glm4v"
    GLM_OCR = "glm_ocr"
    GLM5_NEXT = "glm5_next"
    LING_VL = "ling_vl"
    QWEN2_5_VL = "qwen2_5_vl"


FAMILIES: tuple[str, ...] = tuple(family.value for family in Family)
