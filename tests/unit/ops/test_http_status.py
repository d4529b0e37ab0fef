"""Every error has an HTTP status, and those that are worth a retry have one that says so."""

from __future__ import annotations

import pytest

from encoder_service import errors
from encoder_service.ops.http_status import http_status
from tests.unit.rpc.test_status import CLASSES


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_failure_is_503_if_a_retry_helps_and_4xx_if_the_request_is_wrong(
    cls: type[errors.VisionEncoderError],
) -> None:
    status = http_status(cls("text"))
    is_the_callers = issubclass(
        cls,
        (
            errors.InvalidInput,
            errors.Unauthenticated,
            errors.PermissionDenied,
            errors.NotFound,
            errors.Cancelled,
        ),
    )
    assert (status == 503) == cls.retryable
    assert (400 <= status < 500) == is_the_callers
