"""Process trees by identity, and the record of each server's tree on this node.

A process is its pid and start time, so a pid that was given out again is never mistaken for the
one that was meant. Each server's tree is written to a file in a directory the node's workers share;
``sweep`` kills what is left of servers whose owner is dead, and nothing else. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from rollout_workers.node import records_dir

SHM = Path("/dev/shm")
SHM_FILES = ("sglang_loads_", "sem.mp-")  # load snapshots and semaphores outlive a killed SGLang
_SHM_INODE = re.compile(rf"(\d+) +{SHM}/", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, never another that got the same pid."""

    pid: int
    started: int  # clock ticks since boot: unlike wall time, the same for every reader

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return identify(self.pid) == self


def identify(pid: int) -> ProcessId | None:
    """The process behind ``pid``, or None when there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def tree(root: ProcessId) -> set[ProcessId]:
    """The process and all its descendants that run now."""
    if not root.alive:
        return set()
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(root.pid).children(recursive=True)
        return {root} | {found for child in below if (found := identify(child.pid))}
    return set()


def send(processes: Iterable[ProcessId], number: signal.Signals) -> None:
    """Signal each that still runs."""
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


class _Entry(msgspec.Struct, frozen=True):
    owner: ProcessId
    processes: list[ProcessId]
    run_dir: str
    shm: list[str]


class Record:
    """Owns the node's entry about one server of this process: its tree, and what it leaves."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        root = identify(pid)
        self.processes = {root} if root else set()
        self.shm: set[str] = set()
        self._run_dir = run_dir
        self._path = records_dir() / f"{os.getpid()}-{pid}.json"
        self._write()

    @property
    def alive(self) -> bool:
        """Whether any process of the tree runs."""
        return any(process.alive for process in self.processes)

    @property
    def age_s(self) -> float:
        """How long ago the tree was looked at."""
        return time.monotonic() - self._looked

    def refresh(self) -> None:
        """Add processes and shared-memory files that came up since the last time.

        What is below any known process counts, so that children of one that died are kept.
        """
        before = (self.processes, self.shm)
        self.processes = self.processes.union(*map(tree, self.processes))
        self.shm = self.shm.union(*map(_shared_memory, self.processes))
        self._looked = time.monotonic()
        if (self.processes, self.shm) != before:
            self._write()

    def remove(self) -> None:
        """Forget the server, with its shared-memory files; its tree must be dead."""
        for name in self.shm:
            (SHM / name).unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._looked = time.monotonic()
        owner = identify(os.getpid())
        assert owner, "we run"
        entry = _Entry(owner, list(self.processes), str(self._run_dir), sorted(self.shm))
        draft = self._path.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(entry))
        draft.replace(self._path)  # a reader sees all of it or the one before


def sweep(wait_s: float = 5.0) -> int:
    """Kill recorded servers whose owner is dead; returns how many processes that were."""
    killed = 0
    for path in records_dir().glob("*.json"):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError):
            continue
        if not entry.owner.alive:
            killed += _sweep(path, entry, wait_s)
    return killed


def _sweep(path: Path, entry: _Entry, wait_s: float) -> int:
    stale = set().union(*map(tree, entry.processes))
    send(stale, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while any(process.alive for process in stale) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not any(process.alive for process in stale):
        for name in entry.shm:
            (SHM / Path(name).name).unlink(missing_ok=True)
        shutil.rmtree(entry.run_dir, ignore_errors=True)
        path.unlink(missing_ok=True)
    return len(stale)


def _shared_memory(process: ProcessId) -> set[str]:
    """Names of files the process has mapped; a semaphore is mapped under another name."""
    with contextlib.suppress(OSError):
        mapped = set(_SHM_INODE.findall(Path(f"/proc/{process.pid}/maps").read_text()))
        files = [file for file in os.scandir(SHM) if file.name.startswith(SHM_FILES)]
        return {file.name for file in files if str(file.inode()) in mapped}
    return set()
