"""Pools over scripted engines: real Ray, real worker actors, real processes."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

SPOOLS = tempfile.TemporaryDirectory(prefix="rw-test-spools-")  # gone with the test session
SCRIPTED = Path(__file__).parent.parent / "scripted_engine.py"


def scripted(model: str, *, name: str, workers: int = 2, mark: str = "", **script: Any) -> dict:
    """Configuration of a pool of scripted engines; ``mark`` goes into their environment."""
    import json

    return {
        "name": name,
        "engine": {
            "model": model,
            "device": "cpu",
            "command": [sys.executable, str(SCRIPTED)],
            "env": {"RW_TEST_MARK": mark, "SCRIPTED_ENGINE": json.dumps(script)},
            "start_timeout_s": 120,
        },
        "workers": {"count": workers},
        "buffer": {"directory": SPOOLS.name},
        "ray": {"num_cpus": 2},
    }


def marked(mark: str) -> list[psutil.Process]:
    """All processes that run with ``mark`` in their environment: engines and what they began."""
    return [p for p in psutil.process_iter() if _carries(p, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
        return environment.get("RW_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_gone(mark: str, seconds: float = 10.0) -> list[psutil.Process]:
    """What is left of ``mark`` after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def rays_of(driver: int) -> tuple[set[Path], set[psutil.Process]]:
    """Directories and processes of the private Ray that a driver process began."""
    processes = set(psutil.Process(driver).children(recursive=True))
    words = [word for p in processes for word in p.cmdline() if "/tmp/rw-ray-" in word]
    names = {word[word.index("rw-ray-") :].split("/")[0] for word in words}
    return {Path("/tmp") / name for name in names}, processes


def still_there(processes: set[psutil.Process], seconds: float = 10.0) -> set[psutil.Process]:
    """Which of the processes run after at most ``seconds``, but for two agents of Ray's own.

    When raylet and GCS are killed together, those wait some minutes for a GCS to tell of it.
    """
    agents = {p for p in processes if p.is_running() and p.name() in _AGENTS}
    return set(psutil.wait_procs(processes - agents, timeout=seconds)[1])


_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::DashboardA", "ray::RuntimeEnv")


@contextlib.contextmanager
def ended(process: Any) -> Iterator[Any]:
    """A driver subprocess that is gone when the block is left, however it is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
