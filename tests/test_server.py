"""One engine process: its command line, ports, failures, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from rollout_workers import node
from rollout_workers.config import EngineConfig
from rollout_workers.errors import StartFailed
from rollout_workers.ports import is_free
from rollout_workers.processes import ProcessId, identify, sweep, tree
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


# One server's life


async def test_start_serve_stop(own_node: Path) -> None:
    async with running({"children": 2}) as server:
        processes = tree_of(server.pid)
        assert len(processes) >= 3 and all(os.getpgid(p.pid) == os.getpgid(0) for p in processes)
        assert 20000 <= server.port < 32768 and "serving" in repr(server)
        async with aiohttp.ClientSession() as session:
            for key, status in ((None, 401), ("wrong", 401), ("the-key", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.get(f"{server.url}/model_info", headers=headers) as reply:
                    assert reply.status == status
            assert (await _model_info(session, server))["weight_version"] == "7"
        assert "keys.yaml" in " ".join(left_behind(own_node))
        started = time.monotonic()
        await server.stop()
        assert time.monotonic() - started < 5
        assert all_gone(processes) and left_behind(own_node) == []
        assert is_free(server.port)
        await server.stop()
        assert await server.wait_exit() is not None


async def _model_info(session: aiohttp.ClientSession, server: Server) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with session.get(f"{server.url}/model_info", headers=headers) as reply:
        return dict(await reply.json())


def tree_of(pid: int) -> set[ProcessId]:
    root = identify(pid)
    assert root
    return tree(root)


async def test_an_engine_that_will_not_end_is_killed_after_the_grace() -> None:
    async with running({"ignore_signals": True, "children": 1}) as server:
        processes = tree_of(server.pid)
        started = time.monotonic()
        await server.stop(grace_s=1)
        assert 0.9 < time.monotonic() - started < 4
        assert all_gone(processes)
        assert await server.wait_exit() == -signal.SIGKILL


async def test_early_exit_raises_the_cause_and_leaves_nothing(own_node: Path) -> None:
    line = "sglang serve: error: unrecognized arguments: --frobnicate 1"
    server = new_server(engine_config({"start_exit": 2, "start_log": line, "children": 1}))
    with pytest.raises(StartFailed) as raised:
        await server.start("scripted")
    assert str(raised.value).startswith(f"SGLang refuses its command line: {line} (ended with")
    assert str(server.log_path) in str(raised.value)
    assert left_behind(own_node) == [] and server.ended


async def test_a_slow_start_tells_what_the_engine_said_last(own_node: Path) -> None:
    script = {"start_delay_s": 60, "start_log": "Load weight begin."}
    server = new_server(engine_config(script, start_timeout_s=1))
    with pytest.raises(StartFailed, match=r"^the engine failed: Load weight begin\. \(not serving"):
        await server.start("scripted")
    assert left_behind(own_node) == [] and not identify(server.pid)


async def test_a_command_that_does_not_exist(own_node: Path) -> None:
    server = new_server(engine_config(command=["/no/such/program"]))
    with pytest.raises(StartFailed, match=r"^the engine's command cannot be run.*No such file"):
        await server.start("scripted")
    assert left_behind(own_node) == []


async def test_a_port_that_is_lost_meanwhile_is_replaced(
    own_node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server(engine_config({"start_delay_s": 1}))
    starting = asyncio.create_task(server.start("scripted"))
    try:
        await until(lambda: server.pid)
        lost = server.port
        with socket.create_server(("127.0.0.1", lost)):
            await starting
        assert server.port != lost
        assert "engine.port_taken" in caplog.text and str(lost) in caplog.text
        assert [p.name for p in (own_node / f"rollout_workers-{os.getuid()}/ports").iterdir()] != []
    finally:
        await server.stop(grace_s=0)
    assert left_behind(own_node) == []


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
async def test_stop_while_it_starts(after_s: float, own_node: Path) -> None:
    server = new_server(engine_config({"start_delay_s": 30, "children": 2}))
    starting = asyncio.create_task(server.start("scripted"))
    await until(lambda: server.pid)
    await asyncio.sleep(after_s)
    processes = tree_of(server.pid)
    await asyncio.gather(server.stop(), server.stop())
    with pytest.raises(StartFailed, match="w0 was stopped while it started"):
        await starting
    assert all_gone(processes) and left_behind(own_node) == []


async def test_stop_before_start() -> None:
    server = new_server(engine_config())
    await server.stop()
    with pytest.raises(StartFailed, match="stopped while it started"):
        await server.start("scripted")
    with pytest.raises(StartFailed, match="never started"):
        await server.wait_exit()


async def test_cancelling_start_leaves_nothing(own_node: Path) -> None:
    server = new_server(engine_config({"start_delay_s": 30, "children": 1}))
    starting = asyncio.create_task(server.start("scripted"))
    await until(lambda: server.pid)
    await asyncio.sleep(0.3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert left_behind(own_node) == [] and not identify(server.pid)


async def test_wait_exit_tells_the_code_and_cleans_up(own_node: Path) -> None:
    async with running({"children": 2}) as server:
        processes = tree_of(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(server.wait_exit(), 10) == -signal.SIGKILL
        assert all_gone(processes) and left_behind(own_node) == []


async def test_the_log_is_private_and_its_tail_has_no_keys() -> None:
    async with running({"start_log": "api_key='the-key' admin='the-admin-key'"}) as server:
        assert stat.S_IMODE(server.log_path.stat().st_mode) == 0o600
        assert server.tail(1) == ["api_key='***' admin='***'"]


# Owners that die

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
