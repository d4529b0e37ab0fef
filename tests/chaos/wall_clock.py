"""A wall clock that a test sets while a process runs.

Owns a library, compiled here and preloaded by the process, that adds an offset from a file to the wall clock
and to no other clock, for native code and Python alike.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("WALL_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset_s = page;
}

static int64_t offset(void) { return offset_s ? *offset_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (out) *out = found.tv_sec;
    return found.tv_sec;
}
"""


def can_compile() -> bool:
    return shutil.which("cc") is not None


class WallClock:
    """Of the processes that are started with ``environment``. folder: for the library and the offset."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "wall_clock.c", folder / "wall_clock.so"
        source.write_text(SOURCE)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60
        )
        self._offset = folder / "offset"
        self._offset.write_bytes(bytes(8))
        self.offset_s = 0
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Ahead, or back where it is negative."""
        self.offset_s += seconds
        with self._offset.open("r+b") as opened:
            opened.write(struct.pack("=q", self.offset_s))
