"""``vision-encoder info`` and ``health``: what a running service says of itself."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from encoder_service.cli.connection import Connection, calls_a_service
from encoder_service.cli.output import EXIT_FAILED, fail, plain


@calls_a_service
def info(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(help="Seconds for the whole call.")] = 30.0,
) -> None:
    """Shows what a running service serves, its limits and its transports; with a namespace or a token, also
    whether the token opens the namespace."""
    from rich.console import Console
    from rich.table import Table

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
        fail(f"{connection.server}: {error}")

    table = Table(show_header=False, title=plain(connection.server))

    def add(name: str, value: str) -> None:
        table.add_row(name, plain(value))

    add("server", f"{answer.server_version} on {answer.device}, instance {answer.instance_id[:12]}")
    add("protocol", f"{answer.min_protocol_version} to {answer.protocol_version}")
    if is_named:
        add("namespace", f"{connection.namespace!r} is open to this caller")
    for model in answer.models:
        for name, value in (
            vars(model) | {"modalities": ", ".join(one.value for one in model.modalities)}
        ).items():
            add(name, value.hex() if isinstance(value, bytes) else str(value))
    for name, value in vars(answer.limits).items():
        add(name, f"{value:,}")
    for transport in answer.transports:
        add("transport", str(getattr(transport.delivery, "value", transport.delivery)))
    for name, reason in answer.unusable_kernels.items():
        add("not usable", f"{name}: {reason}")
    Console(markup=False, emoji=False).print(table)  # names are no markup


@calls_a_service
def health(
    connection: Connection,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
) -> None:
    """Exits with 0 when the service says SERVING, with 1 otherwise: for container probes. The service needs
    no token for this; a proxy in front of it may."""
    from lm_adapter import CallFailed, EncoderError

    is_serving = False
    try:
        with connection.client(timeout_s) as client, contextlib.suppress(CallFailed):
            is_serving = client.is_serving()
    except EncoderError as error:
        fail(f"{connection.server}: {error}")
    print("SERVING" if is_serving else "NOT SERVING")
    raise typer.Exit(0 if is_serving else EXIT_FAILED)
