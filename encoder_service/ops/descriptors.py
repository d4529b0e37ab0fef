"""The process's file descriptors: how many there may be."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

# Some libraries walk through all possible descriptors, so not more than this.
MOST = 1 << 20


def raise_limit() -> int:
    """Raises the soft limit on descriptors to the hard one, and returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # the host allows a process less than its limit says
            log.warning("the limit on descriptors stays", limit=soft, hard_limit=hard, cause=str(error))
        else:
            soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else soft
