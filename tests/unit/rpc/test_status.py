"""Every error class has a status, a reason of its own, and travels whole."""

from __future__ import annotations

import asyncio
import base64
import re
from urllib.parse import quote

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from encoder_service import errors
from encoder_service.rpc.status import (
    STATUS_BY_ERROR,
    STATUS_METADATA_KEY,
    as_service_error,
    failure_of,
    status_of,
    status_text,
    trailing_metadata,
)


def all_classes(root: type[errors.VisionEncoderError]) -> list[type[errors.VisionEncoderError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_classes(child))]


CLASSES = all_classes(errors.VisionEncoderError)


def test_every_branch_of_the_tree_has_a_status() -> None:
    assert set(STATUS_BY_ERROR) == set(errors.VisionEncoderError.__subclasses__())


@pytest.mark.parametrize("cls", CLASSES[1:], ids=lambda cls: cls.__name__)
def test_clients_that_know_only_statuses_retry_what_is_retryable(
    cls: type[errors.VisionEncoderError],
) -> None:
    """Except after a device fault: only a client that knows its reason sends the item elsewhere."""
    retried = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert (status_of(cls("text")) in retried) == (cls.retryable and cls is not errors.DeviceFault)


def test_reasons_are_stable_codes_and_leaves_have_their_own() -> None:
    leaves = [cls for cls in CLASSES if not cls.__subclasses__()]
    reasons = [cls.reason for cls in leaves]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z][A-Z_]*", cls.reason) for cls in CLASSES)


def test_foreign_exceptions_become_ours() -> None:
    assert isinstance(as_service_error(ValueError("x")), errors.InternalError)
    assert isinstance(as_service_error(asyncio.CancelledError()), errors.Draining)


def test_retry_advice_travels_in_the_forms_that_google_rpc_and_grpc_define() -> None:
    error = errors.TooManyCalls("7 of 7", retry_after_ms=1250)
    metadata = dict(trailing_metadata(error))
    packed = metadata[STATUS_METADATA_KEY]
    assert isinstance(packed, bytes)
    status = Status.FromString(packed)
    # grpcio-status refuses details whose code or message are not the call's.
    assert (status.code, status.message) == (status_of(error).value[0], status_text(error))
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert info.reason == "TOO_MANY_CALLS"
    assert retry.retry_delay.ToMilliseconds() == 1250
    assert metadata["grpc-retry-pushback-ms"] == "1250"


@pytest.mark.parametrize("error", [errors.QueueFull("full"), errors.InvalidRequest("no", retry_after_ms=5)])
def test_no_advice_where_waiting_has_no_time_or_no_use(error: errors.VisionEncoderError) -> None:
    assert [name for name, _ in trailing_metadata(error)] == ["vision-encoder-failure-bin"]


@pytest.mark.parametrize("text", ["x" * 20_000, "é%\n" * 5_000, "x" * 1_198 + "ééé", "\U0001f600" * 400])
def test_a_call_s_failure_of_any_length_fits_in_the_metadata_that_every_client_takes(text: str) -> None:
    """gRPC clients refuse metadata above 8 KiB by chance, and above 16 KiB always."""
    error = errors.QueueFull(text, retry_after_ms=5, **{"a" * 300: "b" * 3_000})
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = trailing_metadata(error)
    sizes = [
        len(base64.b64encode(value)) if isinstance(value, bytes) else len(value) for _, value in metadata
    ]
    assert sum(sizes) + len(quote(status_text(error))) < 7_500
    packed = dict(metadata)[STATUS_METADATA_KEY]
    assert isinstance(packed, bytes)
    assert Status.FromString(packed).message == status_text(error)
    assert status_text(error).startswith("QUEUE_FULL: " + text[:90])
    assert status_text(error).endswith("...")
    assert failure_of(error).message == text
    assert status_of(error) is status


@pytest.mark.parametrize("text", ["x" * (1_200 - len("QUEUE_FULL: ")), "é" * 150, ""])
def test_a_short_failure_is_sent_whole(text: str) -> None:
    error = errors.QueueFull(text, held=5)
    assert status_text(error) == f"QUEUE_FULL: {text}"
    sent = dict(trailing_metadata(error))["vision-encoder-failure-bin"]
    assert isinstance(sent, bytes)
    assert sent == failure_of(error).SerializeToString()
