"""LMDeploy's operators on a CPU: its default ones, and attention in plain torch.

Shape legend: T tokens of a batch, H query heads, K key heads, D head size, P pages, B tokens of a page.
"""

import torch
from lmdeploy.pytorch.backends.attention import AttentionMetadata, PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.default.op_backend import DefaultOpsBackend
from lmdeploy.pytorch.backends.flash_attention import FlashAttentionBuildSpec
from torch.nn.functional import scaled_dot_product_attention


class PagedAttention:
    def __init__(self, spec):
        self._scale = spec.scale
        assert spec.causal
        assert not any((spec.alibi, spec.sliding_window, spec.use_flash_mla, spec.learnable_sink))

    def forward(self, q_THD, k_TKD, v_TKD, k_PBKD, v_PBKD, attn_metadata, **_):
        out = torch.empty(*q_THD.shape[:-1], v_TKD.shape[-1], dtype=q_THD.dtype)
        size, start = k_PBKD.shape[1], 0
        lengths = zip(
            attn_metadata.q_seqlens.tolist(),
            attn_metadata.kv_seqlens.tolist(),
            attn_metadata.block_offsets,
            strict=True,
        )
        for num_new, num_all, pages in lengths:
            new = slice(start, start + num_new)
            start += num_new
            # A sequence that has ended may be in further steps, beyond its pages, and one may have too few
            # (``AT_ONCE`` of ../answers.py); page 0 is nobody's.
            pages = torch.nn.functional.pad(pages, (0, max(0, -(-num_all // size) - len(pages))))
            indices = torch.arange(num_all)
            at = pages[indices // size].long(), indices % size
            where = tuple(index[num_all - num_new :] for index in at)
            k_PBKD[where], v_PBKD[where] = k_TKD[new], v_TKD[new]
            mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
            q, k, v = (one.transpose(0, 1) for one in (q_THD[new], k_PBKD[at], v_PBKD[at]))
            attended = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self._scale, enable_gqa=True
            )
            out[new] = attended.transpose(0, 1)
        return out


class FlashAttention:
    """Of towers."""

    def __init__(self, spec):
        self._scale = spec.scale

    def forward(self, q_THD, k_TKD, v_TKD, q_start_loc, q_seqlens, **_):
        out = torch.empty_like(q_THD)
        for start, num in zip(q_start_loc.tolist(), q_seqlens.tolist(), strict=True):
            part = slice(start, start + num)
            q, k, v = (one[part].transpose(0, 1) for one in (q_THD, k_TKD, v_TKD))
            out[part] = scaled_dot_product_attention(q, k, v, scale=self._scale).transpose(0, 1)
        return out


class CpuBackend(DefaultOpsBackend):
    @classmethod
    def build_op(cls, spec, *, enable_deterministic=False):
        if isinstance(spec, PagedAttentionBuildSpec):
            return PagedAttention(spec)
        if isinstance(spec, FlashAttentionBuildSpec):
            return FlashAttention(spec)
        return super().build_op(spec, enable_deterministic=enable_deterministic)

    @staticmethod
    def ccl_backend():
        return "gloo"

    @staticmethod
    def support_ray():
        return True

    @staticmethod
    def get_attention_metadata_cls():
        return AttentionMetadata

    @classmethod
    def update_step_context(cls, step_context):
        step_context.attn_metadata = AttentionMetadata(
            step_context.is_decoding,
            step_context.block_offsets,
            q_start_loc=step_context.q_start_loc,
            q_seqlens=step_context.q_seqlens,
            kv_seqlens=step_context.kv_seqlens,
        )
        return step_context
