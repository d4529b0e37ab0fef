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


def rpc_error(
    code: grpc.StatusCode, text: str = "text", trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.RpcError:
    error: Any = grpc.RpcError(text)
    error.code, error.details, error.trailing_metadata = lambda: code, lambda: text, lambda: trailers
    return error


def failed(error: grpc.RpcError) -> CallFailed:
    return from_rpc_error(error, target="host:1", method="Encode", num_items=8, num_arrived=3)


# All others are refusals.
KINDS: dict[type[CallFailed], str] = {
    EncoderUnavailable: "CANCELLED UNAVAILABLE",
    EncoderFault: "INTERNAL UNKNOWN DATA_LOSS",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    EncoderOverloaded: "RESOURCE_EXHAUSTED",
    ProtocolMismatch: "UNIMPLEMENTED",
}
RETRYABLE = "CANCELLED UNAVAILABLE RESOURCE_EXHAUSTED ABORTED"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_p32_every_status_has_an_error_that_names_the_progress(code: grpc.StatusCode) -> None:
    error = failed(rpc_error(code, "the text"))
    kinds = [kind for kind, names in KINDS.items() if code.name in names.split()]
    assert [type(error)] == (kinds or [RequestRefused])
    assert error.retryable is (code.name in RETRYABLE.split())
    for text in ("Encode at host:1", "3 of 8 items", "the text"):
        assert text in str(error)
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
    error = failed(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, trailers=trailers))
    assert (error.reason, error.retryable, error.retry_after_ms) == ("QUEUE_FULL", True, 250)
    assert error.details["queued"] == "9"
    refused = pb.ItemFailure(reason="UNKNOWN_MODEL").SerializeToString()
    error = failed(rpc_error(grpc.StatusCode.NOT_FOUND, trailers=((errors.FAILURE_METADATA_KEY, refused),)))
    assert (type(error), error.reason, error.retryable) == (RequestRefused, "UNKNOWN_MODEL", False)


def test_an_unreadable_account_changes_nothing_else() -> None:
    trailers = ((errors.FAILURE_METADATA_KEY, b"\xff\xff\xff"),)
    error = failed(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "why", trailers))
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
    assert type(failed(rpc_error(code, text))) is EncoderUnavailable


def test_a_message_over_the_limit_is_not_overload() -> None:
    text = "CLIENT: Received message larger than max (9 vs. 4)"
    error = failed(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
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
