"""Warns when another process uses the service's GPU and the two take turns.

Owns what can be known of that from inside a pod. Other pods' processes are hidden there, also from NVML's
list of processes. The memory in use on the GPU is not hidden, and what is not this process's belongs to
others. So a process with little memory is not seen, nor is what it computes. The driver says whether this
process uses MPS, with which kernels of several processes run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

import structlog
import torch

from encoder_service.own_thread import on_own_thread

log = structlog.get_logger(__name__)

# Memory beyond torch's and the arenas' that is taken for another process's. This process's own context,
# modules and captured graphs have up to 2 GiB of it; another encoder has above 5 GiB, a language model's
# server more.
OTHERS_BYTES = 4 << 30
CHECK_S = 60.0
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
REMEDY = (
    "if requests have several or large images, run both processes under NVIDIA's MPS: "
    "docs/deploy.md, One GPU for two processes"
)
# From cuda.h, CU_DEVICE_ATTRIBUTE_MPS_ENABLED: contexts of this process on the device are shared through MPS.
_MPS_ENABLED = 133


class SharedGpu:
    """Of one GPU. arena_bytes: device memory that this process takes without torch's allocator."""

    def __init__(self, device: torch.device, arena_bytes: int) -> None:
        self._device, self._arena_bytes = device, arena_bytes
        self._is_done = False

    def start(self) -> None:
        """Logs whether this process uses MPS, where it could be expected, and checks for other processes."""
        directory = os.environ.get(PIPE_DIRECTORY)
        if uses_mps(self._device):
            self._is_done = True
            log.info("the GPU is used through MPS", device=str(self._device))
        elif directory is not None:
            log.warning(
                "MPS is not used although the environment names its daemon",
                variable=f"{PIPE_DIRECTORY}={directory}",
                remedy="start nvidia-cuda-mps-control -d with this variable before this process, whose user "
                "must be able to open its pipes",
            )
        self.check()

    def check(self) -> None:
        """Warns of another process, once."""
        if self._is_done:
            return
        free, total = torch.cuda.mem_get_info(self._device)
        others_bytes = total - free - torch.cuda.memory_reserved(self._device) - self._arena_bytes
        if others_bytes > OTHERS_BYTES:
            self._is_done = True
            log.warning(
                "another process uses this GPU, and the two take turns",
                device=str(self._device),
                others_gib=round(others_bytes / (1 << 30), 1),
                remedy=REMEDY,
            )

    async def watch(self) -> None:
        """Checks every CHECK_S until it has warned: a language model's server often starts after its
        encoder."""
        with contextlib.suppress(RuntimeError):  # a device fault, which the engine reports
            while not self._is_done:
                await on_own_thread(self.check)
                await asyncio.sleep(CHECK_S)


def uses_mps(device: torch.device) -> bool:
    """Whether this process's contexts on the device go through MPS. Initialises CUDA."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver, found, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    index = device.index or 0
    if not driver.cuDeviceGet(ctypes.byref(found), index) and not driver.cuDeviceGetAttribute(
        ctypes.byref(value), _MPS_ENABLED, found
    ):
        return bool(value.value)
    # A driver before CUDA 12.3 does not know the attribute. A client uses the daemon whose pipe it finds.
    return Path(os.environ.get(PIPE_DIRECTORY, "/tmp/nvidia-mps"), "control").exists()  # noqa: S108
