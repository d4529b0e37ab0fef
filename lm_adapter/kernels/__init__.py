"""Device code: the fused Triton kernels behind ``rotary`` and ``splice``.

Owns nothing but these; the modules inside import triton and are themselves imported at a first launch, so
that the adapter runs where there is no Triton.
"""
