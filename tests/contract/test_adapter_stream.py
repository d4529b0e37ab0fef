"""The stream as the service writes it is the stream that the adapter reads."""

from __future__ import annotations

import pytest

from encoder_service import errors as service_errors
from encoder_service.rpc.status import failure_of, status_of
from lm_adapter.convert import item_failed


def every_error() -> list[type[service_errors.VisionEncoderError]]:
    found = [service_errors.VisionEncoderError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found if not issubclass(cls, service_errors.StartupError)]


@pytest.mark.parametrize("cls", every_error())
def test_p32_every_error_of_the_service_keeps_its_details(
    cls: type[service_errors.VisionEncoderError],
) -> None:
    error = cls("what happened", retry_after_ms=30, found=4, allowed=3)
    failed = item_failed(failure_of(error))
    assert (failed.reason, failed.message, failed.retryable) == (cls.reason, "what happened", cls.retryable)
    assert (failed.retry_after_ms, failed.status) == (30, status_of(error).value[0])
    assert failed.details == {"found": "4", "allowed": "3"}
