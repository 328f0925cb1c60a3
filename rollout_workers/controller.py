"""The controller actor: the only writer of the roster.

One task per worker slot, whose life reads top to bottom: spawn, start, serve, lost. Every change
of who serves is pushed to the routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rollout_workers.config import PoolConfig
from rollout_workers.errors import RolloutError, StartFailed
from rollout_workers.lease import BUFFER_S, STOP_S, TELL_S
from rollout_workers.routing import WorkerInfo, WorkerState

_log = logging.getLogger(__name__)
# Makes the worker actor of that name, given the nodes of the routers; returns its handle.
Spawn = Callable[[str, tuple[str, ...]], Any]


@dataclass(slots=True)
class Slot:
    """One worker's place in the pool, and what became of it."""

    name: str
    state: WorkerState = WorkerState.STARTING
    since: float = 0.0
    reason: str = ""
    handle: Any = None
    placed: bool = False
    info: WorkerInfo | None = None

    def become(self, state: WorkerState, reason: str = "") -> None:
        """Note a change of state, its time and why."""
        self.state, self.since, self.reason = state, time.time(), reason
        _log.info("worker.%s name=%s reason=%s", state, self.name, reason or "-")


class Controller:
    """Owns the worker slots; routers get copies of who serves."""

    def __init__(self, config: PoolConfig, spawn: Spawn, routers: list[Any], buffer: Any) -> None:
        self._config, self._spawn = config, spawn
        self._routers, self._buffer = routers, buffer
        self._slots = [
            Slot(f"{config.name}.worker.{i}", since=time.time())
            for i in range(config.workers.count)
        ]
        self._version = 0
        self._started = time.time()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Start all workers and return their number once all of them serve.

        Raises:
            StartFailed: a worker could not start; the message is the first cause. The others
                are stopped again.
        """
        ready = [asyncio.get_running_loop().create_future() for _ in self._slots]
        self._tasks = [
            asyncio.create_task(self._live(slot, mark), name=slot.name)
            for slot, mark in zip(self._slots, ready, strict=True)
        ]
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.stop_workers()
            raise
        return len(self._slots)

    async def status(self) -> dict[str, Any]:
        """Everything a person asks first: workers, routers, buffer, version, age."""
        routers = await asyncio.gather(*(_ask(router.status) for router in self._routers))
        load: dict[str, Any] = {}
        for router in routers:
            for name, counts in router.get("load", {}).items():
                merged = load.setdefault(name, dict.fromkeys(counts, 0))
                for key, value in counts.items():
                    merged[key] += value
        return {
            "name": self._config.name,
            "model": self._config.engine.model,
            "run_id": self._config.run_id,
            "version": self._version,
            "uptime_s": time.time() - self._started,
            "workers": [self._describe(slot, load.get(slot.name, {})) for slot in self._slots],
            "routers": routers,
            "buffer": await _ask(self._buffer.status),
        }

    async def stop_workers(self) -> None:
        """Stop every engine and its actor, also those that are still starting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            if slot.state is not WorkerState.DOWN:  # which says why, and is stopped too
                slot.become(WorkerState.STOPPED)
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._publish(), TELL_S)
        await asyncio.gather(*(_dismiss(slot) for slot in self._slots if slot.handle))

    async def shutdown(self) -> Any:
        """Stop the whole pool: workers, routers, buffer. The caller then ends this actor.

        Returns what the buffer says of trajectories that nobody acknowledged, None if it is lost.
        """
        await asyncio.gather(self.stop_workers(), *(_retire(router) for router in self._routers))
        return await _retire(self._buffer, BUFFER_S)

    async def stop(self) -> None:
        """What this actor owes its workers when its driver is gone: they end by themselves."""
        for task in self._tasks:
            task.cancel()

    async def _live(self, slot: Slot, ready: asyncio.Future[None]) -> None:
        """The life of one worker."""
        try:
            nodes = await asyncio.gather(*(r.node_id.remote() for r in self._routers))
            slot.handle = self._spawn(slot.name, tuple(nodes))
            slot.info = await self._bring_up(slot)
            slot.become(WorkerState.SERVING)
            await self._publish()
        except BaseException as error:  # whatever it is: somebody waits for this worker
            failure = _failure(slot.name, error)
            slot.info = None
            if not ready.done():
                ready.set_exception(failure)
            if not isinstance(error, Exception):
                raise
            slot.become(WorkerState.DOWN, failure.message)
            return
        if not ready.done():
            ready.set_result(None)
        reason = await _until_exit(slot.handle)
        slot.info = None
        slot.become(WorkerState.DOWN, reason)
        with contextlib.suppress(RayError):  # a router that is lost has no roster
            await self._publish()

    async def _bring_up(self, slot: Slot) -> WorkerInfo:
        await self._placed(slot)
        try:
            info: WorkerInfo = await slot.handle.start.remote(self._version)
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, RolloutError):
                raise cause from None
            raise StartFailed(f"{slot.name} failed to start: {error.cause}") from None
        except RayError as error:
            raise StartFailed(f"{slot.name} was lost while starting: {error}") from None
        return info

    async def _placed(self, slot: Slot) -> None:
        """Wait until Ray has a place for the worker."""
        limit = self._config.workers.placement_timeout_s
        try:
            async with asyncio.timeout(limit):  # wait_for may lose a cancellation
                await slot.handle.info.remote()
            slot.placed = True
        except TimeoutError:
            raise StartFailed(_no_place(self._config, limit)) from None
        except RayTaskError as error:
            raise StartFailed(f"{slot.name} failed to start: {error.cause}") from None
        except RayError as error:
            raise StartFailed(f"{slot.name} could not be created: {error}") from None

    async def _publish(self) -> None:
        serving = [s.info for s in self._slots if s.state is WorkerState.SERVING and s.info]
        await asyncio.gather(
            *(router.set_roster.remote(serving, self._version) for router in self._routers)
        )

    def _describe(self, slot: Slot, load: dict[str, int]) -> dict[str, Any]:
        info = slot.info
        shown: dict[str, Any] = {
            "name": slot.name,
            "state": str(slot.state),
            "since_s": time.time() - slot.since,
            "reason": slot.reason,
            "load": load,
        }
        if info is not None:
            shown |= {
                "url": info.url,
                "version": info.version,
                "uptime_s": time.time() - info.started_at,
                "node_id": info.node_id,
                "pid": info.pid,
                "context_length": info.context_length,
                "log": info.log_path,
            }
        return shown


def _no_place(config: PoolConfig, waited_s: float) -> str:
    gpus = config.engine.tensor_parallel if config.engine.device == "cuda" else 0
    need = {"GPU": gpus, **config.workers.resources}
    wanted = ", ".join(f"{count:g} {kind}" for kind, count in need.items() if count)
    total, free = ray.cluster_resources(), ray.available_resources()
    have = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k} free" for k in need)
    return (
        f"no node had room for a worker within {waited_s:g} s: each of {config.workers.count} "
        f"needs {wanted or 'a node that matches workers.label_selector'}; the cluster has {have}. "
        "Lower workers.count, add nodes, or raise workers.placement_timeout_s"
    )


async def _until_exit(handle: Any) -> str:
    """Why the worker's engine, or the worker itself, ended."""
    while True:
        try:
            return str(await handle.wait_exit.remote())
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(0.5)
        except RayError as error:
            return f"worker actor lost: {str(error).splitlines()[0]}"


def _failure(name: str, error: BaseException) -> RolloutError:
    """What a start that ended with ``error`` is told as."""
    if isinstance(error, asyncio.CancelledError):
        return StartFailed(f"{name} was stopped while it started")
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(cause, RolloutError):
        return cause
    text = str(cause).strip().splitlines()
    return StartFailed(
        f"{name} could not start: {type(cause).__name__}: {text[0] if text else 'no message'}"
    )


async def _dismiss(slot: Slot) -> None:
    """End a worker's actor; one without a place yet has no engine, and could not answer."""
    if slot.placed:
        await _retire(slot.handle)
        return
    with contextlib.suppress(RayError, ValueError):
        ray.kill(slot.handle)


async def _retire(handle: Any, within_s: float | None = None) -> Any:
    """Let an actor stop in order; end it by force if it does not. Returns its last word."""
    word = None
    with contextlib.suppress(RayError, TimeoutError):
        word = await asyncio.wait_for(handle.stop.remote(), within_s or STOP_S)
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle)
    return word


async def _ask(method: Any) -> dict[str, Any]:
    try:
        return dict(await asyncio.wait_for(method.remote(), 5))
    except (RayError, TimeoutError) as error:
        return {"error": f"{type(error).__name__}: no answer"}
