"""Servers over the scripted engine, and what to look for after them."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_workers.config import EngineConfig
from rollout_workers.processes import ProcessId, identify, tree
from rollout_workers.server import Server

ENGINE = Path(__file__).with_name("scripted_engine.py")


@pytest.fixture(autouse=True)
def own_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A temporary directory of its own for each test, in this process and those it starts."""
    with tempfile.TemporaryDirectory(prefix="rw-test-") as base:
        monkeypatch.setenv("TMPDIR", base)
        monkeypatch.setattr("tempfile.tempdir", base)
        yield Path(base)


def engine_config(script: dict[str, object] | None = None, **settings: object) -> EngineConfig:
    env = {"SCRIPTED_ENGINE": json.dumps(script or {})}
    defaults: dict[str, object] = {
        "model": "scripted",
        "device": "cpu",
        "command": [sys.executable, str(ENGINE)],
        "env": env,
        "start_timeout_s": 60,
    }
    return EngineConfig.model_validate(defaults | settings)


def new_server(config: EngineConfig, name: str = "w0") -> Server:
    return Server(name, config, api_key="the-key", admin_key="the-admin-key", host="127.0.0.1")


@asynccontextmanager
async def running(script: dict[str, object] | None = None) -> AsyncIterator[Server]:
    server = new_server(engine_config(script))
    try:
        await server.start("scripted", version=7)
        yield server
    finally:
        await server.stop(grace_s=0)


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


def all_gone(processes: set[ProcessId]) -> bool:
    return not any(process.alive for process in processes)


def left_behind(base: Path) -> list[str]:
    """Files under the node directory but for logs."""
    files = (path for path in base.rglob("*") if path.is_file() and path.suffix != ".log")
    return [str(path.relative_to(base)) for path in files]


def tree_of(pid: int) -> set[ProcessId]:
    root = identify(pid)
    assert root
    return tree(root)
