"""Options that Typer takes from elsewhere than a function's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable


def with_options(
    function: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """The function, of which Typer sees these parameters in place of its own. They come by keyword."""
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return function
