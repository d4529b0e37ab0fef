"""A stand-in for SGLang's kernel package on a CPU: the operators that tiny Qwen3-VL and Qwen3.5 models call,
in plain torch. Every other name of the package exists and raises when it is called.

`convert_weight_packed` stays undefined: SGLang takes its presence for AMX.

Shapes: N tokens of all sequences, HK and HV heads of keys and values, DK and DV their widths. The recurrence
is the gated delta rule (https://arxiv.org/abs/2412.06464), a token at a time.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


class Missing:
    """A kernel that nothing in the tests may call."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} has no stand-in")


class Submodule(types.ModuleType):
    __path__: Any = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return KERNELS.get(name) or Missing(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        # Without scalar_type SGLang takes its own.
        if fullname.startswith(f"{__name__}.") and not fullname.endswith(".scalar_type"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Submodule(spec.name)

    def exec_module(self, module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"sgl_kernel.{name}")


def fused_sigmoid_mul_cpu(x, gate):
    x.mul_(gate.sigmoid())


def gemma_norm(x, weight, eps, head_dim):
    heads = x.reshape(*x.shape[:-1], -1, head_dim)
    return (functional.rms_norm(heads.float(), (head_dim,), eps=eps) * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    return (
        gemma_norm(q, q_weight, eps, head_dim).reshape(q.shape),
        gemma_norm(k, k_weight, eps, head_dim).reshape(k.shape),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Each head has its query and then its gate."""
    num_tokens = len(q_gate)
    q, gate = q_gate.reshape(num_tokens, num_heads, 2, head_dim).unbind(2)
    q = gemma_norm(q.reshape(num_tokens, -1), q_weight, eps, head_dim)
    k = gemma_norm(k, k_weight, eps, head_dim)
    return q.reshape(num_tokens, -1), k.reshape(num_tokens, -1), gate.reshape(num_tokens, -1)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_k, num_v, k_dim, v_dim):
    num_tokens = len(qkvz)
    qkv, z = qkvz.split([2 * num_k * k_dim + num_v * v_dim, num_v * v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(num_tokens, num_v, v_dim), b.contiguous(), a.contiguous()


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """The logarithm of the decay, and the share of the new value: [1, N, HV] each."""
    log_decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return log_decay[None], b.float().sigmoid().to(b.dtype)[None]


def delta_rule(q, k, v, log_decay, beta, states, slots, starts):
    """q and k: [1, N, HK, DK]; v and the result: [1, N, HV, DV]. states is updated in place."""
    repeats, scale = v.shape[2] // q.shape[2], q.shape[-1] ** -0.5
    q = functional.normalize(q[0].float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 1) * scale
    k = functional.normalize(k[0].float(), dim=-1, eps=1e-6).repeat_interleave(repeats, 1)
    decay, beta, out = log_decay[0].float().exp(), beta[0].float(), torch.empty_like(v)
    bounds = starts.tolist()
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        state = states[slots[sequence]].float()
        for token in range(start, end):
            state = state * decay[token, :, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k[token])
            change = (v[0, token].float() - seen) * beta[token, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[token], change)
            out[0, token] = torch.einsum("hkv,hk->hv", state, q[token]).to(out.dtype)
        states[slots[sequence]] = state.to(states.dtype)
    return out


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    return delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **_
):
    num_heads = A_log.numel()
    log_decay, beta = fused_gdn_gating_cpu(A_log, a.reshape(-1, num_heads), b.reshape(-1, num_heads), dt_bias)
    return delta_rule(q, k, v, log_decay, beta, initial_state_source, initial_state_indices, cu_seqlens)


def convolve(x, before, weight, bias, activation):
    """One sequence, x: [channels, tokens]; before: the inputs that the first tokens still see."""
    seen = torch.cat([before.to(x.dtype), x], dim=1)
    out = functional.conv1d(seen[None], weight[:, None], bias, groups=len(x))[0]
    return functional.silu(out) if activation else out, seen[:, -before.shape[1] :]


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias=None,
    activation=None,
    conv_states=None,
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    **_,
):
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        slot = cache_indices[sequence]
        before = conv_states[slot] * has_initial_state[sequence]
        out[:, start:end], conv_states[slot] = convolve(x[:, start:end], before, weight, bias, activation)
    return out


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias=None, activation=None, conv_state_indices=None, **_
):
    out = torch.empty_like(x)
    for sequence, slot in enumerate(conv_state_indices):
        made, conv_states[slot] = convolve(x[sequence][:, None], conv_states[slot], weight, bias, activation)
        out[sequence] = made[:, 0]
    return out


def fused_rmsnorm_gated_cpu(x, weight, gate, eps):
    normed = functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (normed * functional.silu(gate.float())).to(x.dtype)


KERNELS = {
    name: kernel
    for name, kernel in globals().items()
    if name.endswith("_cpu") and isinstance(kernel, types.FunctionType)
}
for kernel_name, kernel in KERNELS.items():
    setattr(torch.ops.sgl_kernel, kernel_name, kernel)
sys.meta_path.append(Finder())
