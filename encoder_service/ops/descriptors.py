"""The limit on the process's file descriptors."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

# The limit is not raised above this, because some libraries loop over all possible descriptors.
MAX_LIMIT = 1 << 20


def raise_limit() -> int:
    """Raises the soft limit on descriptors to the hard limit, up to MAX_LIMIT. Returns the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < raised:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        except (OSError, ValueError) as error:  # a sandbox may allow less than the hard limit
            log.warning(
                "the limit on descriptors cannot be raised", limit=soft, hard_limit=hard, cause=str(error)
            )
        else:
            soft = raised
    return MAX_LIMIT if soft == resource.RLIM_INFINITY else soft
