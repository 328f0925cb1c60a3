"""Directories that the workers of one node share.

They lie under the system's temporary directory, one per user, closed to others: key files and
the records by which stale servers are killed are in them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rollout_workers.errors import StartFailed

_LONGEST_TMPDIR = 70  # a unix socket's path has room for 107 bytes
_TAIL_BYTES = 256 << 10
_REMEDY = "have it removed, or set TMPDIR"


def node_dir(name: str) -> Path:
    """A shared directory, made if it is missing.

    Raises:
        StartFailed: what stands there is another user's, open to others, or no directory.
    """
    base = Path(tempfile.gettempdir()) / f"rollout_workers-{os.getuid()}"
    mode = _own(base)
    if mode & 0o077:
        raise StartFailed(f"{base} is open to others (mode {mode:o}): {_REMEDY}")
    path = base / name
    _own(path)
    return path


def _own(path: Path) -> int:
    """Make our directory, or see that it is one, following no link; returns its mode."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartFailed(f"{path} is not a directory: {_REMEDY}")
    if found.st_uid != os.getuid():
        raise StartFailed(f"{path} belongs to another user: {_REMEDY}")
    return stat.S_IMODE(found.st_mode)


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


def log_tail(path: Path, lines: int, secrets: Iterable[str]) -> list[str]:
    """The last lines of a log, without the secrets; none where there is no log."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
        for secret in secrets:
            text = text.replace(secret, "***")
        return text.splitlines()[-lines:]
    return []
