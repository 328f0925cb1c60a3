"""Ports of this node that no other server of ours uses.

A port is tested by binding it and reserved by a lock on a file named after it, in a directory that
all workers of the node share, so that servers which start together never choose the same one. The
lock ends with its process. Programs that are not ours can still take a port between the test and
its use: the server then fails and is started on others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from rollout_workers.errors import StartFailed

# Below 32768, where the kernel takes ports for outgoing connections; above Ray's worker ports.
FIRST, LAST = 20000, 29999


class PortLease:
    """Owns some ports of the node until it is released or its process ends."""

    def __init__(self, directory: Path, count: int, first: int = FIRST, last: int = LAST) -> None:
        """Reserve ``count`` distinct free ports.

        Raises:
            StartFailed: so many are not free.
        """
        self._locks: dict[int, tuple[Path, int]] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for port in _shuffled(first, last):
            if len(self._locks) == count:
                return
            self._try(directory / str(port), port)
        if len(self._locks) < count:
            self.release()
            raise StartFailed(f"fewer than {count} ports are free between {first} and {last}")

    @property
    def ports(self) -> tuple[int, ...]:
        """The reserved ports, in a fixed order."""
        return tuple(self._locks)

    def release(self) -> None:
        """Give the ports back; doing it again changes nothing."""
        while self._locks:
            _, (path, lock) = self._locks.popitem()
            path.unlink(missing_ok=True)
            os.close(lock)

    def _try(self, path: Path, port: int) -> None:
        lock = _lock(path)
        if lock is None:
            return
        self._locks[port] = (path, lock)
        if not is_free(port):
            del self._locks[port]
            path.unlink(missing_ok=True)
            os.close(lock)


def is_free(port: int) -> bool:
    """Whether nothing on this node is bound to ``port``, on any address."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def _shuffled(first: int, last: int) -> Iterator[int]:
    start, size = random.randrange(last - first + 1), last - first + 1
    return (first + (start + step) % size for step in range(size))


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The former holder may have removed the file between our open and our lock.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    os.close(descriptor)
    return None
