"""Fused Triton kernels for ``rotary`` and ``splice``.

Modules in this package import triton. They are imported at the first launch, so the adapter also runs without
Triton.
"""
