"""The stream as the service writes it is the stream that the adapter reads."""

from __future__ import annotations

import grpc
import pytest

from encoder_service import errors as service_errors
from encoder_service.rpc.status import failure_of, status_of
from lm_adapter.convert import item_failed
from lm_adapter.errors import EncoderFault, EncoderUnavailable, from_rpc_error


def every_error() -> list[type[service_errors.VisionEncoderError]]:
    found = [service_errors.VisionEncoderError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found if not issubclass(cls, service_errors.StartupError)]


class Aborted(grpc.RpcError):
    """A caller's view of ``context.abort`` without failure metadata."""

    def __init__(self, status: grpc.StatusCode) -> None:
        super().__init__(status.name)
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status


@pytest.mark.parametrize("cls", every_error())
def test_p32_every_error_of_the_service_keeps_its_details(
    cls: type[service_errors.VisionEncoderError],
) -> None:
    error = cls("what happened", retry_after_ms=30, found=4, allowed=3)
    failed = item_failed(failure_of(error))
    assert (failed.reason, failed.message, failed.retryable) == (cls.reason, "what happened", cls.retryable)
    assert (failed.retry_after_ms, failed.status) == (30, status_of(error).value[0])
    assert failed.details == {"found": "4", "allowed": "3"}


@pytest.mark.parametrize("cls", every_error())
def test_p32_retryable_agrees_with_the_status_alone(cls: type[service_errors.VisionEncoderError]) -> None:
    """Without the failure metadata, the status still says whether to try again. A device fault then looks
    like a defect, and a cancelled call like a service that stops."""
    status = status_of(cls("x"))
    call_failed = from_rpc_error(Aborted(status), target="t", method="Encode")
    if cls is service_errors.DeviceFault:
        assert isinstance(call_failed, EncoderFault)
    elif cls is service_errors.Cancelled:
        assert isinstance(call_failed, EncoderUnavailable)
    else:
        assert call_failed.retryable is cls.retryable
