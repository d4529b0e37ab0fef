"""``vision-encoder info`` and ``health``: what a running service says of itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encoder_service.cli.connection import Connection, calls_a_service
from encoder_service.cli.output import (
    EXIT_FAILED,
    complain,
    error_fields,
    fail_at,
    plain,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from lm_adapter import ServerInfo

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on one line.")]


@calls_a_service
def info(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds for the whole call.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Shows what a running service serves, its limits and its transports; with a namespace or a token, also
    whether the token opens the namespace."""
    from lm_adapter import EncoderError

    try:
        # Routed calls, because the server may be a gateway.
        with connection.client(timeout_s, fleet=True) as client:
            answer = client.info()
            is_named = bool(connection.namespace or connection.read_token())
            if is_named:
                # No key is all zeros. A refusal is the answer.
                client.lookup([bytes(32)], routing_digests=[bytes(32)])
    except EncoderError as error:
        fail_at(connection.server, error, as_json=as_json)
    namespace = connection.namespace if is_named else None
    if as_json:
        print_json({"server": connection.server, "open_namespace": namespace} | fields_of(answer))
    else:
        show_info(connection.server, answer, namespace)


def fields_of(answer: ServerInfo) -> dict[str, Any]:
    """The server's answer as it stands in JSON: the fields of ``lm_adapter.ServerInfo``, digests in
    hexadecimal."""
    fields = asdict(answer) | {"unusable_kernels": dict(answer.unusable_kernels)}
    for model, record in zip(fields["models"], answer.models, strict=True):
        for name in ("model_fingerprint", "preprocess_fingerprint"):
            model[name] = model[name].hex()
        model["modalities"] = [modality.value for modality in record.modalities]
    return fields


def show_info(server: str, answer: ServerInfo, namespace: str | None) -> None:
    """namespace: that was found open."""
    from rich.table import Table

    table = Table(show_header=False, title=plain(server))

    def add(name: str, value: str) -> None:
        table.add_row(name, plain(value))

    add("server", f"{answer.server_version} on {answer.device}, instance {answer.instance_id[:12]}")
    versions = sorted({answer.min_protocol_version, answer.protocol_version})
    add("protocol", " to ".join(map(str, versions)))
    if namespace is not None:
        add("namespace", f"{namespace!r} is open to this caller")
    for model in answer.models:
        for name, value in (
            vars(model) | {"modalities": ", ".join(one.value for one in model.modalities)}
        ).items():
            add(name, value.hex() if isinstance(value, bytes) else str(value))
    for name, value in vars(answer.limits).items():
        add(name, f"{value:,}")
    for transport in answer.transports:
        add("transport", str(getattr(transport.delivery, "value", transport.delivery)))
    if answer.device == "cpu":
        add("GPU kernels", "none, the tower runs on the CPU")
    else:
        for name, reason in answer.unusable_kernels.items():
            add("not usable", f"{name}: {reason}")
    print_table(table)


@calls_a_service
def health(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Exits with 0 when the service says SERVING, with 1 otherwise: for container probes. The service needs
    no token for this; a proxy in front of it may."""
    from lm_adapter import CallFailed, EncoderError

    is_serving = False
    failure: dict[str, Any] = {}
    try:
        with connection.client(timeout_s) as client:
            is_serving = client.is_serving()
    except CallFailed as error:
        failure = error_fields(error)
        complain(str(error))
    except EncoderError as error:
        fail_at(connection.server, error, as_json=as_json)
    if as_json:
        print_json({"server": connection.server, "serving": is_serving} | failure)
    else:
        print("SERVING" if is_serving else "NOT SERVING")
    raise typer.Exit(0 if is_serving else EXIT_FAILED)
