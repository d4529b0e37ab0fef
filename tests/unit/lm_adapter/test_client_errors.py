"""The error tree, and gRPC's errors as the adapter tells them."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest

from lm_adapter import errors
from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    EncoderUnavailable,
    ProtocolMismatch,
    RequestRefused,
    from_rpc_error,
)
from vision_encoder.v1 import encoder_pb2 as pb


class FakeRpcError(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode, text: str = "text", trailers: tuple[tuple[str, str | bytes], ...] = ()
    ) -> None:
        super().__init__(text)
        self._parts = (code, text, trailers)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


def failed(error: grpc.RpcError) -> CallFailed:
    return from_rpc_error(error, target="host:1", method="Encode", num_items=8, num_arrived=3)


EXPECTED: dict[grpc.StatusCode, tuple[type[CallFailed], bool]] = {
    grpc.StatusCode.CANCELLED: (EncoderUnavailable, True),
    grpc.StatusCode.UNKNOWN: (EncoderFault, False),
    grpc.StatusCode.INVALID_ARGUMENT: (RequestRefused, False),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, False),
    grpc.StatusCode.NOT_FOUND: (RequestRefused, False),
    grpc.StatusCode.ALREADY_EXISTS: (RequestRefused, False),
    grpc.StatusCode.PERMISSION_DENIED: (RequestRefused, False),
    grpc.StatusCode.UNAUTHENTICATED: (RequestRefused, False),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (EncoderOverloaded, True),
    grpc.StatusCode.FAILED_PRECONDITION: (RequestRefused, False),
    grpc.StatusCode.ABORTED: (RequestRefused, True),
    grpc.StatusCode.OUT_OF_RANGE: (RequestRefused, False),
    grpc.StatusCode.UNIMPLEMENTED: (ProtocolMismatch, False),
    grpc.StatusCode.INTERNAL: (EncoderFault, False),
    grpc.StatusCode.UNAVAILABLE: (EncoderUnavailable, True),
    grpc.StatusCode.DATA_LOSS: (EncoderFault, False),
}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_p32_every_status_has_an_error_that_names_the_progress(code: grpc.StatusCode) -> None:
    error = failed(FakeRpcError(code, "the text"))
    kind, retryable = EXPECTED[code]
    assert type(error) is kind
    assert isinstance(error, CallFailed)
    assert error.retryable is retryable
    assert "Encode at host:1" in str(error)
    assert "3 of 8 items" in str(error)
    assert "the text" in str(error)
    assert error.details["status"] == code.name


def test_the_services_own_account_wins() -> None:
    account = pb.ItemFailure(
        reason="QUEUE_FULL",
        status=8,
        message="m",
        retryable=True,
        retry_after_ms=250,
        details={"queued": "9"},
    )
    trailers = (("other", "x"), (errors.FAILURE_METADATA_KEY, account.SerializeToString()))
    error = failed(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, trailers=trailers))
    assert (error.reason, error.retryable, error.retry_after_ms) == ("QUEUE_FULL", True, 250)
    assert error.details["queued"] == "9"
    refused = pb.ItemFailure(reason="UNKNOWN_MODEL").SerializeToString()
    error = failed(
        FakeRpcError(grpc.StatusCode.NOT_FOUND, trailers=((errors.FAILURE_METADATA_KEY, refused),))
    )
    assert (type(error), error.reason, error.retryable) == (RequestRefused, "UNKNOWN_MODEL", False)


def test_an_unreadable_account_changes_nothing_else() -> None:
    trailers = ((errors.FAILURE_METADATA_KEY, b"\xff\xff\xff"),)
    error = failed(FakeRpcError(grpc.StatusCode.INVALID_ARGUMENT, "why", trailers))
    assert (type(error), error.reason) == (RequestRefused, "INVALID_ARGUMENT")
    assert "why" in str(error)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.UNKNOWN, "Socket closed"),
    ],
)
def test_p32_a_cut_connection_is_unavailable_under_any_code(code: grpc.StatusCode, text: str) -> None:
    assert type(failed(FakeRpcError(code, text))) is EncoderUnavailable


def test_a_message_over_the_limit_is_not_overload() -> None:
    text = "CLIENT: Received message larger than max (9 vs. 4)"
    error = failed(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert (type(error), error.reason, error.retryable) == (RequestRefused, "MESSAGE_TOO_LARGE", False)


def test_a_bare_rpc_error_maps_too() -> None:
    assert type(from_rpc_error(grpc.RpcError("bare"), target="t", method="m")) is EncoderFault


def test_reasons_are_codes_and_python_callers_can_catch_their_own_kinds() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, EncoderError)
    ]
    for cls in classes:
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", cls.default_reason)
    assert isinstance(errors.InvalidRequest("x"), ValueError)
    assert isinstance(errors.MissingDependency("p", "this"), ImportError)
