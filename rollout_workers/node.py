"""Directories that the workers of one node share.

They lie under the system's temporary directory, one per user, closed to others: key files and
the records by which stale servers are killed are in them.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from rollout_workers.errors import StartFailed

_LONGEST_TMPDIR = 70  # a unix socket's path has room for 107 bytes


def node_dir(name: str) -> Path:
    """A shared directory, made if it is missing.

    Raises:
        StartFailed: another user made it.
    """
    base = Path(tempfile.gettempdir()) / f"rollout_workers-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise StartFailed(f"{base} belongs to another user: have it removed, or set TMPDIR")
    path = base / name
    path.mkdir(exist_ok=True)
    return path


def records_dir() -> Path:
    """Where records of servers are; containers with one temporary directory each have their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return node_dir(f"servers-{boot}-{namespace}")


def new_run_dir() -> Path:
    """A directory of one server, short enough for its sockets; removed with the server."""
    parent = node_dir("run")
    short = len(str(parent)) <= _LONGEST_TMPDIR
    return Path(tempfile.mkdtemp(None, "rw-", parent if short else "/tmp"))


def new_log(name: str, directory: Path | None) -> Path:
    """An empty log that only we can read, since SGLang logs its keys."""
    directory = directory or node_dir("logs")
    directory.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    descriptor, path = tempfile.mkstemp(".log", f"{name}-{stamp}-", directory)
    os.close(descriptor)
    return Path(path)
