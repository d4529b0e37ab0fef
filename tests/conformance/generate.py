"""Makes the golden vectors from the reference package and the rules as written, or checks those on disk.

    python -m tests.conformance.generate           # writes vectors/v1
    python -m tests.conformance.generate --check   # says which cases the reference answers otherwise

Owns which vectors there are, and the manifest. A version's answers never change: a rule that changes gets a
new version beside it. Needs the reference package, as tests do.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from tests.conformance import reference_identity, reference_positions, reference_processors, vectors
from tests.conformance.vectors import FOLDER, VERSION, Vectors, difference


def made() -> list[Vectors]:
    """All vectors, made now. The reference warns about its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            *reference_identity.all_vectors(),
            *reference_processors.all_vectors(),
            *reference_positions.all_vectors(),
        ]
    return sorted(found, key=lambda one: one.subject)


def differences(fresh: list[Vectors], stored: list[Vectors]) -> list[str]:
    """Where vectors made now are not the stored ones: cases missing, asked otherwise, or answered so."""
    changes = []
    stored_cases = {(case.subject, case.name): case for one in stored for case in one.cases}
    fresh_cases = {(case.subject, case.name): case for one in fresh for case in one.cases}
    changes += [
        f"{key[0]}, {key[1]}: {'only on disk' if key in stored_cases else 'not on disk'}"
        for key in sorted(stored_cases.keys() ^ fresh_cases.keys())
    ]
    for key in sorted(stored_cases.keys() & fresh_cases.keys()):
        old, new = stored_cases[key], fresh_cases[key]
        # Through JSON, as the stored ones came.
        asked, expected = json.loads(json.dumps([new.asked, new.expected]))
        wrong = difference(asked, old.asked, "input") or difference(expected, old.expected)
        if wrong or asked.keys() != old.asked.keys() or expected.keys() != old.expected.keys():
            changes.append(f"{key[0]}, {key[1]}: {wrong or 'other fields'}")
    return changes


def write(fresh: list[Vectors], folder: Path) -> None:
    from tests.parity.reference import import_reference

    folder.mkdir(parents=True, exist_ok=True)
    for one in fresh:
        (folder / f"{one.subject}.json").write_text(vectors.text_of(one))
    manifest = {
        "version": VERSION,
        "reference": {"transformers": import_reference().__version__},
        "cases": {one.subject: len(one.cases) for one in fresh},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    parser.add_argument("--out", type=Path, default=FOLDER / VERSION, help="the version's folder")
    options = parser.parse_args()
    fresh = made()
    if not options.check:
        write(fresh, options.out)
        return 0
    changes = differences(fresh, vectors.load())
    print(
        "\n".join(changes) or f"{sum(len(one.cases) for one in fresh)} cases are what the reference answers"
    )
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
