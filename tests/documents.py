"""Links, anchors, cited results and cited commits of all documents lead somewhere. `make lint` runs this."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURES = re.compile(r"<!-- figures: (.*?) -->")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b")


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.split()


@cache
def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def problems(document: Path, commits: list[str]) -> list[str]:
    text, found = document.read_text(), []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.resolve()):
            found.append(f"{link}: no such heading")
    for cited in FIGURES.findall(text):
        found += [f"figures of {name}: no such file" for name in cited.split(", ") if not Path(name).exists()]
    if commits:
        cited = set(COMMIT.findall(text))
        found += [
            f"commit {name} is not in the history"
            for name in cited
            if not any(c.startswith(name) for c in commits)
        ]
    return [f"{document}: {problem}" for problem in found]


documents = [Path(name) for name in git("ls-files", "*.md")]
is_whole = git("rev-parse", "--is-shallow-repository") == ["false"]
history = git("log", "--format=%H") if is_whole else []
if wrong := [line for document in documents for line in problems(document, history)]:
    sys.exit("\n".join(wrong))
