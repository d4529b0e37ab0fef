"""The ids of models on a hub, apart from ``hub``, whose library takes half a second to import."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from encoder_service.errors import CheckpointError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """A model on the hub. repo: ORG/NAME. revision: a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]


def hub_id(model: Path) -> HubId | None:
    """The id that a value of ``--model`` is. None for a folder's path: one that exists, or that is no
    ORG/NAME[@REVISION]."""
    found = HUB_ID.fullmatch(str(model))
    if found is None or model.exists():
        return None
    return HubId(found["repo"], found["revision"] or "main")


def check_model(model: Path) -> None:
    """Raises CheckpointError unless the value of ``--model`` is a hub id or a checkpoint's folder."""
    if hub_id(model) is not None:
        return
    if not model.exists():
        raise CheckpointError(
            f"--model is {model}: there is no such folder, and it is no hub id such as ORG/NAME"
        )
    if not (model / "config.json").is_file():
        raise CheckpointError(f"--model is {model}: it has no config.json, needs a checkpoint's folder")
