"""Owners that die: the server's tree goes with them, or the next sweep finds what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import all_gone, engine_config, left_behind, own_node, running, tree_of, until

from rollout_workers import node
from rollout_workers.config import EngineConfig
from rollout_workers.processes import SHM, Record, identify, sweep

__all__ = ["own_node"]  # a fixture for every test here

OWNER = """
import asyncio, json, os, sys
from rollout_workers.config import EngineConfig
from rollout_workers.server import Server

async def main():
    config = EngineConfig.model_validate_json(sys.argv[1])
    server = Server("w0", config, api_key="k1", admin_key="k2", host="127.0.0.1")
    starting = asyncio.create_task(server.start("scripted"))
    while not server.pid:
        await asyncio.sleep(0.01)
    print(server.pid, flush=True)
    await starting
    print("serving", flush=True)
    await server.wait_exit()

asyncio.run(main())
"""


@pytest.fixture
def owner() -> Iterator[Callable[[EngineConfig], tuple[subprocess.Popen[str], int]]]:
    """Starts a process that owns a server; gives it and the server's pid."""
    owners: list[subprocess.Popen[str]] = []

    def start(config: EngineConfig) -> tuple[subprocess.Popen[str], int]:
        argv = [sys.executable, "-c", OWNER, config.model_dump_json()]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        owners.append(process)
        assert process.stdout
        return process, int(process.stdout.readline())

    yield start
    for process in owners:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.4, 0.8, 1.2])
async def test_the_tree_dies_with_an_owner_killed_at_any_moment_of_the_start(
    owner: Callable[[EngineConfig], tuple[subprocess.Popen[str], int]], after_s: float
) -> None:
    process, pid = owner(engine_config({"start_delay_s": 30, "children": 3}))
    await asyncio.sleep(after_s)
    processes = tree_of(pid)
    process.kill()
    process.wait()
    await until(lambda: all_gone(processes))


async def test_sweep_kills_what_a_dead_owner_left_and_nothing_else(
    owner: Callable[[EngineConfig], tuple[subprocess.Popen[str], int]], own_node: Path
) -> None:
    # An engine outside our Pythons does not die by itself: only its record can find it.
    script = "exec 3>&1; sleep 300 & sleep 300"
    config = engine_config(command=["bash", "-c", script], start_timeout_s=100)
    process, pid = owner(config)
    await until(lambda: len(tree_of(pid)) == 3)
    await asyncio.sleep(1.5)  # the record is refreshed each second
    processes = tree_of(pid)
    async with running() as other:
        assert sweep() == 0, "its owner lives"
        process.kill()
        process.wait()
        assert not all_gone(processes)
        assert sweep() == len(processes) == 3
        assert all_gone(processes) and sweep() == 0
        assert identify(other.pid)
    assert [name for name in left_behind(own_node) if "/ports/" not in name] == []


def test_a_record_takes_shared_memory_with_it(own_node: Path) -> None:
    holder = "import multiprocessing as m; l = m.get_context('spawn').Lock(); print(l, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{holder}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout and process.stdout.readline()
        record = Record(process.pid, own_node)
        record.refresh()
        assert len(record.processes) == 2, "with its resource tracker"
        for found in record.processes:
            os.kill(found.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    (left,) = record.shm
    assert (SHM / left).exists()
    record.remove()
    assert not (SHM / left).exists()


def test_a_record_never_kills_a_process_that_got_the_same_pid(own_node: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        now = identify(bystander.pid)
        assert now
        gone = {"pid": 2**22 - 1, "started": 1}
        entry = {"owner": gone, "run_dir": str(own_node / "gone"), "shm": ["../../etc/x"]}
        entry["processes"] = [{"pid": now.pid, "started": now.started - 1}]
        record = node.records_dir() / "1-2.json"
        record.write_text(json.dumps(entry))
        (record.parent / "torn.json").write_text('{"owner":')
        assert sweep() == 0
        assert bystander.poll() is None and not record.exists()
    finally:
        bystander.kill()
        bystander.wait()
