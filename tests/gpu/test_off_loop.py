"""Copies that an asyncio client hands to a thread, on the caller's CUDA streams."""

from __future__ import annotations

import threading

import pytest
import torch

from lm_adapter.transport.off_loop import LARGE_COPY_BYTES, CallerStreams

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

CYCLES = 200_000_000
"""About a tenth of a second."""


async def test_p20_a_copy_on_a_thread_is_ordered_behind_the_callers_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.zeros(LARGE_COPY_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        source.fill_(7)
        streams = CallerStreams()

    def copy() -> tuple[torch.Tensor, torch.cuda.Stream, int]:
        out = torch.empty_like(source)
        out.copy_(source, non_blocking=True)
        return out, torch.cuda.current_stream(device), threading.get_ident()

    out, current, thread = await streams.run(LARGE_COPY_BYTES, copy)
    assert current == stream
    assert thread != threading.get_ident()
    stream.synchronize()
    assert bool((out == 7).all())
    _, current, _ = await CallerStreams().run(LARGE_COPY_BYTES, copy)
    assert current == torch.cuda.default_stream(device), "the thread was left as it was found"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_the_callers_device_is_current_and_so_is_another_devices_stream() -> None:
    far = torch.cuda.Stream(torch.device("cuda", 1))
    with torch.cuda.stream(far), torch.cuda.device(0):
        streams = CallerStreams()
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
    found = await streams.run(
        LARGE_COPY_BYTES, lambda: (torch.cuda.current_device(), torch.cuda.current_stream(1))
    )
    assert found == (0, far)
