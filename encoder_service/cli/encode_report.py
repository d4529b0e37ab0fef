"""What ``encode`` shows: failures as they come, a table or lines of JSON, and the sum at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encoder_service.cli.inputs import Source
from encoder_service.cli.output import (
    EXIT_FAILED,
    as_text,
    complain,
    error_fields,
    plain,
    print_json,
    print_table,
)
from encoder_service.cli.progress import Progress

if TYPE_CHECKING:
    from encoder_service.cli.rows_output import Written
    from lm_adapter import EncodedRows, EncoderError

MAX_TABLE_ITEMS = 100
"""A table of more items is left out."""
COLUMNS = ("grid", "rows", "width", "dtype", "tier", "ms", "key")
MISSING = ("-",) * 4


class RunEnded(Exception):
    """The run cannot go on. ``str`` is a sentence; error: the service's, if it is one."""

    def __init__(self, message: str, error: EncoderError | None = None) -> None:
        super().__init__(message)
        self.error = error


class Report:
    """Of the items of one run. files, index: with rows and of their tensors, once it has ended."""

    def __init__(self, server: str, sources: Sequence[Source], *, as_json: bool) -> None:
        self.progress = Progress(len(sources))
        self.files: Sequence[Path] = ()
        self.index: Path | None = None
        self._server = server
        self._sources = sources
        self._as_json = as_json
        self._has_table = not as_json and len(sources) <= MAX_TABLE_ITEMS
        self._lines: dict[int, tuple[str, ...]] = {}
        self._tiers: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._num_skipped = 0

    def encoded(self, index: int, source: Source, rows: EncodedRows, written: Written | None) -> None:
        self._tiers[rows.tier.value] += 1
        self.progress.advance()
        if self._has_table:
            self._lines[index] = (
                "x".join(str(side) for side in rows.grid_thw),
                str(rows.num_rows),
                str(rows.width),
                rows.dtype,
                rows.tier.value,
                f"{rows.timings.total_ms:.1f}",
                rows.key.hex()[:12],
            )
        where = {} if written is None else {"file": as_text(str(written.path)), "file_index": written.index}
        self._print(index, source, fields_of(rows) | where)

    def skipped(self, index: int, source: Source, key: bytes) -> None:
        self._num_skipped += 1
        self.progress.advance()
        if self._has_table:
            self._lines[index] = (*MISSING, "there", "-", key.hex()[:12])
        self._print(index, source, {"skipped": True, "key": key.hex()})

    def failed(self, index: int, source: Source, error: EncoderError) -> None:
        self._reasons[error.reason] += 1
        self.progress.advance(failed=True)
        if self._has_table:
            self._lines[index] = (*MISSING, "failed", "-", "-")
        named = str(error) if str(error).startswith(error.reason) else f"{error.reason}: {error}"
        self.progress.note(f"{source.name}: {named}")
        self._print(index, source, error_fields(error))

    def show(self) -> int:
        """The table and the sum of a run that has ended. Returns the exit code."""
        num_items, num_failed = len(self._sources), self._reasons.total()
        if num_failed < self.progress.num_done:
            if self._has_table:
                self._show_table()
            if not self._as_json:
                print(plain(self._sum()))
        if not num_failed:
            return 0
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        complain(f"{num_failed} of {num_items} images failed: {reasons}")
        return EXIT_FAILED

    def end_with(self, message: str, error: EncoderError | None = None) -> None:
        """Shows why a run ended before its last item."""
        if self._as_json and error is not None:
            print_json({"server": self._server} | error_fields(error))
        complain(message if error is None or self._server in message else f"{self._server}: {message}")
        if self.progress.num_done:
            self.show()
            complain(
                f"ended after {self.progress.num_done} of {len(self._sources)} images"
                + ("; --resume continues" if self.files else "")
            )

    def _sum(self) -> str:
        tiers = ", ".join(f"{count} {tier}" for tier, count in self._tiers.most_common())
        elapsed_s = self.progress.elapsed_s
        rate = self._tiers.total() / max(elapsed_s, 1e-3)
        text = f"{self._tiers.total()} encoded in {elapsed_s:.1f} s, {rate:.1f}/s"
        text += f" ({tiers})" if tiers else ""
        text += f", {self._num_skipped} were there" if self._num_skipped else ""
        if not self.files:
            return text
        first, last = str(self.files[0]), str(self.files[-1])
        text = f"{text}; rows in {first}" + (f" to {last}" if last != first else "")
        return text if self.index is None else f"{text}, index {self.index}"

    def _show_table(self) -> None:
        """Items of the same name are shown by their paths."""
        from rich.table import Column, Table

        num_of_name = Counter(Path(source.name).name for source in self._sources)
        table = Table(Column("image", overflow="fold"), *COLUMNS)
        for index, line in sorted(self._lines.items()):
            source = self._sources[index]
            name = Path(source.name).name
            table.add_row(plain(name if num_of_name[name] == 1 and not source.is_url else source.name), *line)
        print_table(table)

    def _print(self, index: int, source: Source, fields: dict[str, Any]) -> None:
        """Raises RunEnded without a reader."""
        if not self._as_json:
            return
        try:
            print_json({"index": index, "path": as_text(source.name)} | fields)
        except OSError as error:
            raise RunEnded(f"standard output: {error.strerror or error}") from error


def fields_of(rows: EncodedRows) -> dict[str, Any]:
    """Rows as they stand in JSON."""
    return {
        "key": rows.key.hex(),
        "content_digest": rows.content_digest.hex(),
        "grid_thw": list(rows.grid_thw),
        "num_rows": rows.num_rows,
        "width": rows.width,
        "dtype": rows.dtype,
        "num_deepstack_levels": rows.num_deepstack_levels,
        "tier": rows.tier.value,
        "timings": asdict(rows.timings),
    }
