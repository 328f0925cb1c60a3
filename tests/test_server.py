"""One engine process, from start to end: it serves, says why it cannot, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from servers import (
    all_gone,
    engine_config,
    left_behind,
    new_server,
    own_node,
    running,
    tree_of,
    until,
)

from rollout_workers.errors import StartFailed
from rollout_workers.ports import is_free
from rollout_workers.processes import Record, identify
from rollout_workers.server import Server

__all__ = ["own_node"]  # a fixture for every test here


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


async def test_an_engine_that_will_not_end_is_killed_after_the_grace() -> None:
    async with running({"ignore_signals": True, "children": 1}) as server:
        processes = tree_of(server.pid)
        started = time.monotonic()
        await server.stop(grace_s=1)
        assert 0.9 < time.monotonic() - started < 4
        assert all_gone(processes)
        assert await server.wait_exit() == -signal.SIGKILL


async def test_what_cannot_be_killed_keeps_its_record(
    own_node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running({"ignore_signals": True, "children": 1}) as server:
        processes, before = tree_of(server.pid), left_behind(own_node)
        with monkeypatch.context() as patch:
            patch.setattr("rollout_workers.server.send", lambda processes, number: None)
            patch.setattr("rollout_workers.server._KILL_S", 0.3)
            await server.stop(grace_s=0)
        assert "engine.unkillable" in caplog.text
        assert not all_gone(processes) and sorted(left_behind(own_node)) == sorted(before)
        assert len(before) >= 3, "record, keys and ports"
        await server.stop(grace_s=0)
        assert all_gone(processes) and left_behind(own_node) == []


async def test_processes_are_looked_at_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()

    def refresh(record: Record) -> None:
        threads.add(threading.get_ident())
        looking(record)

    looking = Record.refresh
    monkeypatch.setattr(Record, "refresh", refresh)
    async with running() as server:
        await server.stop()
    assert threads and threading.get_ident() not in threads


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
    server = new_server(engine_config(script, start_timeout_s=8))
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
