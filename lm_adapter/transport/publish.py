"""Pixels put into shared memory for the service to read: named segments, and memfds given to the broker.

Owns a published segment's end: whoever holds ``PublishedPixels`` closes it, a context manager or the garbage
collector does, and the interpreter at its end; the first counts. What a killed process leaves is told by its
name (``segment_names``) and a lock (``segment_lock``), and swept; a memfd goes with its broker connection. A
forked child ends nothing of its parent's. Which items are published is ``pixel_choice``'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from lm_adapter.convert import dtype_number
from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.transport import segment_lock, segment_names
from lm_adapter.transport.broker_client import BrokerClient
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

__all__ = ["PublishFailed", "PublishedPixels", "publish_pixels"]

SHM_FOLDER = "/dev/shm"  # noqa: S108
MODE = 0o600
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_swept: set[tuple[str, str]] = set()


class PublishFailed(EncoderError):
    """No room, no broker, or no right to the folder: the pixels may go inline."""

    default_reason = "PUBLISH_FAILED"
    default_retryable = True


class PublishedPixels:
    """One tensor in a segment of its own, row-major. A context manager."""

    def __init__(self, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
        """Not published yet; see ``publish_pixels``."""
        self.dtype = dtype
        self.shape = shape
        self.num_bytes = num_bytes
        self.name = ""
        self.segment_id = b""
        self.owner_id = b""
        self._broker: BrokerClient | None = None
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[[int, Callable[[], None]], PublishedPixels] | None = None

    def message(self) -> pb.ShmTensor:
        """How a request names it. The service ends the segment when it has read the request."""
        return pb.ShmTensor(
            name=self.name,
            dtype=dtype_number(self.dtype),
            shape=self.shape,
            unlink_after_read=True,
            segment_id=self.segment_id,
            owner_id=self.owner_id,
        )

    @property
    def is_open(self) -> bool:
        """Whether this side still has the segment to end."""
        return self._finalizer is not None and self._finalizer.alive

    def close(self, *, consumed: bool = False) -> None:
        """Ends the segment, where the service has not. consumed: the service has read it. Twice is once."""
        if self._finalizer is None:
            return
        if not self.segment_id:
            self._finalizer()
        elif self._finalizer.detach() is not None and not consumed and os.getpid() == self._pid:
            assert self._broker is not None
            self._broker.unpublish(self.segment_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _owns(self, end: Callable[[], None]) -> None:
        self._finalizer = weakref.finalize(self, _end_in_own_process, self._pid, end)


def publish_pixels(
    pixel_values: npt.NDArray[Any] | torch.Tensor,
    *,
    prefix: str = "",
    folder: str = SHM_FOLDER,
    broker: BrokerClient | None = None,
) -> PublishedPixels:
    """Copies a numpy array or a torch tensor, of any strides and on any device, into a new segment: under a
    name with this prefix, or into a memfd that the broker is given.

    Raises PublishFailed, InvalidRequest for a dtype that does not travel or an empty tensor, TypeError for
    what is neither array nor tensor.
    """
    if bool(prefix) == (broker is not None):
        raise InvalidRequest("pixels are published under a prefix or to a broker, one of the two")
    dtype, shape, data = contiguous_bytes(pixel_values)
    dtype_number(dtype)
    if not data.nbytes:
        raise InvalidRequest(f"pixel_values of shape {shape} are empty")
    published = PublishedPixels(dtype, shape, data.nbytes)
    try:
        if broker is None:
            _publish_named(published, data, prefix, folder)
        else:
            _publish_memfd(published, data, broker)
    except BaseException as error:
        published.close()
        if isinstance(error, OSError):
            raise PublishFailed(f"{data.nbytes} bytes of pixels: {error.strerror}") from error
        if isinstance(error, EncoderError):
            raise PublishFailed(f"{data.nbytes} bytes of pixels: {error.message}") from error
        raise
    return published


def contiguous_bytes(
    pixel_values: npt.NDArray[Any] | torch.Tensor,
) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    """dtype name, shape, and row-major little-endian bytes: a view where the memory is so already. Raises
    TypeError."""
    if isinstance(pixel_values, np.ndarray):
        little = pixel_values.dtype.newbyteorder("<")
        array = np.ascontiguousarray(pixel_values, dtype=little)
        return little.name, pixel_values.shape, array.reshape(-1).view(np.uint8)
    # Whoever holds a tensor has imported torch already.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(pixel_values, torch.Tensor):
        raise TypeError(
            f"pixel_values is a numpy array or a torch tensor, found {type(pixel_values).__name__}"
        )
    tensor = pixel_values.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy()


def _publish_named(published: PublishedPixels, data: npt.NDArray[np.uint8], prefix: str, folder: str) -> None:
    if (folder, prefix) not in _swept:  # once, when this process begins to publish here
        _swept.add((folder, prefix))
        segment_names.sweep(folder, prefix)
    published.name = segment_names.new_name(prefix, segment_lock.held_lock(folder, prefix))
    path = os.path.join(folder, published.name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, MODE)
    try:
        made = os.fstat(descriptor)
        published._owns(lambda: _unlink(path, made.st_dev, made.st_ino))
        _write(descriptor, data)
    finally:
        os.close(descriptor)


def _publish_memfd(published: PublishedPixels, data: npt.NDArray[np.uint8], broker: BrokerClient) -> None:
    descriptor = os.memfd_create("vision-encoder-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        segment_id, owner_id = broker.publish(descriptor, data.nbytes)
    finally:
        os.close(descriptor)
    try:
        published.segment_id, published.owner_id, published._broker = segment_id, owner_id, broker
        published._owns(lambda: broker.unpublish_later(segment_id))
    except BaseException:  # an interrupt: nothing ends the segment yet
        broker.unpublish(segment_id)
        raise


def _write(descriptor: int, data: npt.NDArray[np.uint8]) -> None:
    """Written, not mapped: a folder without room says so, instead of killing the process."""
    os.posix_fallocate(descriptor, 0, data.nbytes)
    rest = data.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _unlink(path: str, device: int, inode: int) -> None:
    """Removes the name while it leads to what was published under it."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == (device, inode):
            os.unlink(path)


def _end_in_own_process(pid: int, end: Callable[[], None]) -> None:
    if os.getpid() == pid:
        end()
