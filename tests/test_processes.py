"""Owners that die: the server's tree goes with them, or the next sweep finds what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import all_gone, engine_config, left_behind, own_node, running, tree_of, until

from rollout_workers import node
from rollout_workers.config import EngineConfig
from rollout_workers.errors import StartFailed
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


def test_a_refresh_reads_the_node_once_however_large_the_tree(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "sleep 60 & (sleep 60 & sleep 60 & echo up; wait)"
    process = subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    listed: list[str] = []
    listing = os.listdir
    monkeypatch.setattr("os.listdir", lambda path: [listed.append(path), *listing(path)][1:])
    try:
        assert process.stdout and process.stdout.readline()
        record = Record(process.pid, own_node)
        record.refresh()
        assert len(record.processes) == 5
        listed.clear()
        record.refresh()
        assert listed == ["/proc"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_removed_record_does_not_come_back(own_node: Path) -> None:
    process = subprocess.Popen(
        ["bash", "-c", "sleep 60 & echo up; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout and process.stdout.readline()
        record = Record(process.pid, own_node)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: record.refresh(), range(50)))
        assert len(record.processes) == 2 and len(left_behind(own_node)) == 1
        record.remove()
        assert left_behind(own_node) == []
        record = Record(process.pid, own_node)
        record.remove()
        record.refresh()  # it would see a new process, the child
        assert left_behind(own_node) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_directory_of_a_node_is_ours_alone(
    own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = own_node / f"rollout_workers-{os.getuid()}"
    elsewhere = own_node / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)
    with pytest.raises(StartFailed, match="is not a directory: have it removed, or set TMPDIR"):
        node.node_dir("run")
    assert list(elsewhere.iterdir()) == []
    base.unlink()
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(StartFailed, match=r"open to others \(mode 755\)"):
        node.node_dir("run")
    base.chmod(0o700)
    (base / "run").symlink_to(elsewhere)
    with pytest.raises(StartFailed, match="run is not a directory"):
        node.node_dir("run")
    made = node.node_dir("logs")
    assert node.node_dir("logs") == made and stat.S_IMODE(made.stat().st_mode) == 0o700
    uid = os.getuid()
    base.rename(base.with_name(f"rollout_workers-{uid + 1}"))
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    with pytest.raises(StartFailed, match="belongs to another user"):
        node.node_dir("logs")


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
