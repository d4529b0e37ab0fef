"""A torch tensor over memory that is not torch's: by address, on a stated device, keeping its owner alive.

Owns the DLPack capsule (dmlc.github.io/dlpack, the unversioned DLManagedTensor) and its deleter. Unlike the
array interfaces it lets the caller say which GPU reads the memory, instead of asking the driver where the
bytes lie, and it neither warns of nor refuses read-only memory.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["borrow"]

_CPU, _CUDA = 1, 2
_UINT = 1


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


# By the address of the managed tensor: what has to live as long as torch reads it.
_lent: dict[int, tuple[Any, ...]] = {}


def _give_back(address: int | None, lent: dict[int, tuple[Any, ...]] = _lent) -> None:
    lent.pop(address or 0, None)


_deleter = _Deleter(_give_back)
# Torch may free a tensor after this module was torn down at exit: the callback is never freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def borrow(address: int, num_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """uint8 [num_bytes] over the memory at ``address``, which ``device`` can read. owner is kept alive until
    the last tensor over it is gone."""
    import torch
    from torch.utils.dlpack import from_dlpack

    shape = (ctypes.c_int64 * 1)(num_bytes)
    managed = _ManagedTensor(
        _Tensor(
            data=address,
            device=_Device(_CUDA if device.type == "cuda" else _CPU, device.index or 0),
            ndim=1,
            dtype=_DataType(_UINT, 8, 1),
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
            strides=None,
            byte_offset=0,
        ),
        None,
        _deleter,
    )
    key = ctypes.addressof(managed)
    _lent[key] = (managed, shape, owner)
    try:
        # Inside inference mode too, an ordinary tensor.
        with torch.inference_mode(False):
            tensor: torch.Tensor = from_dlpack(_new_capsule(key, b"dltensor", None))
            return tensor
    except BaseException:
        _lent.pop(key, None)
        raise
