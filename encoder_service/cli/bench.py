"""``vision-encoder bench``: a load on the user's own server, and its figures as tables or JSON.

Owns the command, its warm-up and what is shown. ``bench_load`` sends and measures, ``bench_images`` has what
is sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encoder_service.cli.connection import Connection, calls_a_service
from encoder_service.cli.inputs import expand
from encoder_service.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    fail,
    fail_at,
    plain,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from encoder_service.cli.bench_images import Contents
    from encoder_service.cli.bench_load import Extent

UNBOUNDED = 1_000_000
"""Items in flight in an open loop: the service's limits count, not the client's."""
DURATION_S = 10.0
INFO_S = 30.0
WARM_UP_CONCURRENCY = 8
LATE_SHARE = 0.1
"""Of the median latency: a sender that was later than this, at its p99, is named."""


@calls_a_service
def bench(
    connection: Connection,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: images at a time.")] = 16,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: images a second.")] = None,
    sizes: Annotated[str, typer.Option(help="Generated images, in turn: 448x448,1024x768.")] = "448x448",
    png: Annotated[bool, typer.Option("--png", help="Generate PNG in place of JPEG.")] = False,
    files: Annotated[
        list[str] | None, typer.Option(help="Files, a folder or a pattern, in place of generated images.")
    ] = None,
    repeats: Annotated[float, typer.Option(min=0, max=1, help="Share of images sent before.")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help=f"Seconds; {DURATION_S:g} without --num-images.")
    ] = None,
    num_images: Annotated[int | None, typer.Option(min=1, help="Ends after this many images.")] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Images before the clock starts.")] = 16,
    inline: Annotated[bool, typer.Option("--inline", help="Rows by gRPC, on its own host too.")] = False,
    fleet: Annotated[bool, typer.Option("--fleet", help="The server is a gateway; route calls.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds for each image.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measures a running service under a load of images; exits with 1 when any failed."""
    from encoder_service.cli.bench_images import Contents
    from encoder_service.cli.bench_load import Extent
    from lm_adapter import EncoderError

    try:
        images = images_of(sizes, files, as_png=png)
    except (ValueError, OSError) as error:
        fail(str(error))
    except EncoderError as error:
        fail(error.message)
    if duration is None:
        duration = math.inf if num_images else DURATION_S
    result: dict[str, Any] = {"server": connection.server, "loop": "closed" if rate is None else "open"}
    result |= {"concurrency": concurrency} if rate is None else {"rate": rate}
    result |= {"files": len(images)} if files else {"sizes": sizes}
    result |= {"repeats": repeats}

    load = (Contents(images, repeats), Extent(duration, num_images or math.inf), warm_up)
    code = 0
    try:
        asyncio.run(
            measure(connection, result, *load, concurrency, rate, timeout_s, inline=inline, fleet=fleet)
        )
    except EncoderError as error:
        fail_at(connection.server, error, as_json=as_json)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if "images_per_s" not in result:
        raise typer.Exit(code)
    if as_json:
        print_json(result)
    else:
        show(result)
    raise typer.Exit(code or (EXIT_FAILED if result["num_failed"] else 0))


async def measure(
    connection: Connection,
    result: dict[str, Any],
    contents: Contents,
    extent: Extent,
    warm_up: int,
    concurrency: int,
    rate: float | None,
    timeout_s: float,
    inline: bool,
    fleet: bool,
) -> None:
    """Adds to the result what the server is and what its callers saw, also when it is interrupted. Raises
    EncoderError."""
    from encoder_service.cli.bench_load import Extent, Load, figures
    from lm_adapter import AsyncVisionEncoderClient

    client_options = connection.client_options(timeout_s)
    client_options |= {
        "transports": ("inline",) if inline else ("host", "inline"),
        # In an open loop what the service refuses is a result, and all that is due is sent.
        "waits": rate is None,
        "max_in_flight": concurrency if rate is None else UNBOUNDED,
    }
    async with AsyncVisionEncoderClient(connection.server, fleet=fleet, **client_options) as client:
        server = await client.info(timeout_s=min(timeout_s, INFO_S))
        transport = await client.wait_transport()
        names = ", ".join(model.name for model in server.models)
        result.update(device=server.device, model=names, transport=transport.name)
        if warm_up:
            await Load(client, contents, Extent(math.inf, warm_up)).closed(WARM_UP_CONCURRENCY)
        load = Load(client, contents, extent)
        try:
            await (load.closed(concurrency) if rate is None else load.open(rate))
        finally:
            result.update(figures(load.samples, load.elapsed_s, extent.duration_s))


def images_of(sizes: str, files: Sequence[str] | None, *, as_png: bool) -> list[bytes]:
    """What is sent. Raises ValueError, OSError, MissingDependency."""
    from encoder_service.cli.bench_images import generated, parse_sizes, read_files

    if not files:
        return generated(parse_sizes(sizes), as_png=as_png)
    inputs = expand(files)
    for source in inputs.sources:
        if source.problem or source.is_url:
            raise ValueError(f"{source.name}: {source.problem or 'bench sends files, no URLs'}")
    found, num_left_out = read_files([source.name for source in inputs.sources])
    if num_left_out:
        complain(f"{num_left_out} of {len(inputs.sources)} files are left out: bench keeps 1 GiB in memory")
    return found


def show(result: Mapping[str, Any]) -> None:
    """The figures as tables."""
    from rich.table import Table

    load = f"{result['rate']:g} a second" if "rate" in result else f"{result['concurrency']} at a time"
    what = f"{result['files']} files" if "files" in result else result["sizes"]
    facts = Table(show_header=False, title=plain(result["server"]))
    for name, value in (
        ("model", f"{result['model']} on {result['device']}, rows: {result['transport']}"),
        ("load", f"{load}, {what}, {result['repeats']:.0%} repeats"),
        ("images", f"{result['num_images']} in {result['elapsed_s']:.1f} s, {result['num_failed']} failed"),
        ("images a second", f"{result['images_per_s']:.1f}"),
        ("patches a second", f"{result['patches_per_s']:,.0f}"),
        ("rows", f"{result['rows_bytes_per_s'] / 1e6:,.1f} MB a second"),
        ("tiers", shares(result["tiers"])),
        ("failures", shares(result["failures"])),
    ):
        facts.add_row(name, plain(value))
    print_table(facts)
    if result["latency_ms"] is None:
        return
    latencies = Table("milliseconds", *result["latency_ms"])
    stages = {f"  {name}": values for name, values in result["stages_ms"].items()}
    for name, values in ({"latency": result["latency_ms"]} | stages).items():
        latencies.add_row(name, *(f"{value:.1f}" for value in values.values()))
    print_table(latencies)
    if stages:
        print("stages: of encoded images, by the service's clock; outside: their time beyond it")
    late_ms = result["late_ms"]["p99"]
    if late_ms > LATE_SHARE * result["latency_ms"]["p50"]:
        print(f"this process sent late, by {late_ms:.1f} ms at p99; latencies include it")


def shares(counts: Mapping[str, int]) -> str:
    total = max(1, sum(counts.values()))
    return ", ".join(f"{count} {name} ({count / total:.0%})" for name, count in counts.items()) or "none"
