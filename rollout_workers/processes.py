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
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

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
    found = _stat(pid)
    return found[0] if found else None


def trees(roots: Iterable[ProcessId]) -> set[ProcessId]:
    """These processes and all their descendants that run now, by one look at the node."""
    running = {}
    children: dict[int, list[ProcessId]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (found := _stat(int(name))):
            process, parent = found
            running[process.pid] = process
            children.setdefault(parent, []).append(process)
    rest = [root for root in roots if running.get(root.pid) == root]
    seen: set[ProcessId] = set()
    while rest:
        process = rest.pop()
        if process not in seen:
            seen.add(process)
            rest += children.get(process.pid, ())
    return seen


def tree(root: ProcessId) -> set[ProcessId]:
    """The process and all its descendants that run now."""
    return trees([root])


def _stat(pid: int) -> tuple[ProcessId, int] | None:
    """A process that runs, and the pid of its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (ProcessId(pid, int(fields[19])), int(fields[1]))


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
    """Owns the node's entry about one server of this process: its tree, and what it leaves.

    Thread-safe, since a look at all processes of a node is no work for an event loop.
    """

    def __init__(self, pid: int, run_dir: Path) -> None:
        root = identify(pid)
        self.processes = {root} if root else set()
        self.shm: set[str] = set()
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._removed = False
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
        with self._lock:
            if self._removed:
                return
            before = (self.processes, self.shm)
            self.processes = self.processes | trees(self.processes)
            self.shm = self.shm | _shared_memory(self.processes)
            self._looked = time.monotonic()
            if (self.processes, self.shm) != before:
                self._write()

    def remove(self) -> None:
        """Forget the server for good, with its shared-memory files; its tree must be dead."""
        with self._lock:
            self._removed = True
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
    stale = trees(entry.processes)
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


def _shared_memory(processes: Iterable[ProcessId]) -> set[str]:
    """Names of files they have mapped; a semaphore is mapped under another name."""
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            mapped.update(_SHM_INODE.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    with contextlib.suppress(OSError):
        files = [file for file in os.scandir(SHM) if file.name.startswith(SHM_FILES)]
        return {file.name for file in files if str(file.inode()) in mapped}
    return set()
