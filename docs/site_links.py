"""For the site: links that leave docs/ lead to the repository. mkdocs calls ``on_page_markdown``."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[[^\]]*\])\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Raises PluginError for a file that the repository lacks."""

    def in_repository(match: re.Match[str]) -> str:
        text, target, anchor = match[1], posixpath.normpath(match[2])[len("../") :], match[3] or ""
        if not (ROOT / target).exists():
            raise PluginError(f"{page.file.src_path} links to {target}, which does not exist")
        kind = "raw" if text.startswith("!") else "tree" if (ROOT / target).is_dir() else "blob"
        return f"{text}({config.repo_url}/{kind}/main/{target}{anchor})"

    return LINK.sub(in_repository, markdown)
