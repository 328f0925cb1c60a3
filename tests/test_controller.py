"""The controller over stand-ins for actor handles: whatever goes wrong, a start ends and says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rollout_workers.config import PoolConfig
from rollout_workers.controller import Controller
from rollout_workers.errors import StartFailed
from rollout_workers.routing import WorkerInfo


class Method:
    """What ``handle.method`` is: ``remote`` gives something to await."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.remote = answer


class Handle:
    """An actor handle whose methods are coroutines given by name; others answer nothing."""

    def __init__(self, **methods: Callable[..., Awaitable[Any]]) -> None:
        self._methods = methods
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Method:
        async def answer(*args: Any) -> Any:
            self.calls.append(name)
            return await self._methods[name](*args) if name in self._methods else {}

        return Method(answer)


async def node(*args: Any) -> str:
    return "node"


async def never(*args: Any) -> None:
    await asyncio.Event().wait()


async def die(*args: Any) -> None:
    raise ActorDiedError()


async def serve(*args: Any) -> WorkerInfo:
    return WorkerInfo(
        name="w", url="http://w", api_key="k", admin_key="a", version=0, vocab_size=8,
        context_length=8, max_prompt_tokens=8, max_total_tokens=8, node_id="node", pid=1,
        started_at=0.0, log_path="log",
    )  # fmt: skip


def worker(**methods: Callable[..., Awaitable[Any]]) -> Handle:
    return Handle(**{"start": serve, "wait_exit": never, **methods})


def controller(spawn: Callable[..., Any], router: Handle | None = None, count: int = 2) -> Any:
    config = PoolConfig.load({"name": "p", "workers": {"count": count}})
    return Controller(config, spawn, [router or Handle(node_id=node)], Handle())


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    gone: list[Any] = []
    monkeypatch.setattr("ray.kill", gone.append)
    return gone


async def start(under_test: Any) -> Any:
    async with asyncio.timeout(10):
        return await under_test.start()


async def until(condition: Callable[[], Any], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


async def states(under_test: Any) -> list[tuple[str, str]]:
    return [(w["state"], w["reason"]) for w in (await under_test.status())["workers"]]


async def test_all_serve() -> None:
    under_test = controller(lambda name, nodes: worker())
    assert await start(under_test) == 2
    assert [state for state, _ in await states(under_test)] == ["serving", "serving"]
    await under_test.stop_workers()
    assert [state for state, _ in await states(under_test)] == ["stopped", "stopped"]


async def test_a_name_that_is_taken_ends_the_start(killed: list[Any]) -> None:
    slow = worker(start=never)

    def spawn(name: str, nodes: Any) -> Handle:
        if name.endswith("1"):
            raise ValueError("the name is taken")
        return slow

    under_test = controller(spawn)
    with pytest.raises(StartFailed, match=r"p\.worker\.1 could not start: ValueError: the name is"):
        await start(under_test)
    first, second = await states(under_test)
    assert first[0] == "stopped" and second[0] == "down" and "the name is taken" in second[1]
    assert killed == [slow]


@pytest.mark.parametrize("method", ["node_id", "set_roster"])
async def test_a_dead_router_ends_the_start(killed: list[Any], method: str) -> None:
    made: list[Handle] = []

    def spawn(name: str, nodes: Any) -> Handle:
        made.append(worker())
        return made[-1]

    under_test = controller(spawn, Handle(**{"node_id": node, method: die}))
    with pytest.raises(StartFailed, match="ActorDiedError"):
        await start(under_test)
    assert killed == made
    assert all("stop" in handle.calls for handle in made)


async def test_a_start_that_is_cancelled_stops_its_workers(killed: list[Any]) -> None:
    slow = worker(start=never)
    under_test = controller(lambda name, nodes: slow, count=1)
    starting = asyncio.create_task(under_test.start())
    await until(lambda: "start" in slow.calls)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert killed == [slow] and "stop" in slow.calls


async def test_a_pool_that_is_stopped_while_it_starts_says_so(killed: list[Any]) -> None:
    slow = worker(start=never)
    under_test = controller(lambda name, nodes: slow, count=1)
    starting = asyncio.create_task(under_test.start())
    await until(lambda: "start" in slow.calls)
    await under_test.stop_workers()
    with pytest.raises(StartFailed, match="was stopped while it started"):
        await starting


async def test_a_worker_without_a_place_is_not_asked_to_stop(killed: list[Any]) -> None:
    nowhere = worker(info=die)
    under_test = controller(lambda name, nodes: nowhere, count=1)
    with pytest.raises(StartFailed, match="could not be created"):
        await start(under_test)
    assert killed == [nowhere] and "stop" not in nowhere.calls


async def test_a_lost_worker_is_down_even_if_the_router_is_gone() -> None:
    leave = asyncio.Event()
    lost_router = Handle(node_id=node)

    async def exit_(*args: Any) -> str:
        await leave.wait()
        lost_router._methods["set_roster"] = die
        return "it went"

    under_test = controller(lambda name, nodes: worker(wait_exit=exit_), lost_router, count=1)
    await start(under_test)
    leave.set()
    await until(lambda: under_test._slots[0].state == "down")
    assert await states(under_test) == [("down", "it went")]
    await under_test.stop_workers()


async def test_what_hangs_is_ended_by_force(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    stuck, router = worker(stop=never), Handle(node_id=node, stop=never, set_roster=node)
    under_test = controller(lambda name, nodes: stuck, router, count=1)
    await start(under_test)
    monkeypatch.setattr("rollout_workers.controller.STOP_S", 0.05)
    async with asyncio.timeout(5):
        await under_test.shutdown()
    assert stuck in killed and router in killed
