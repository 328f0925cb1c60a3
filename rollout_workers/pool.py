"""``RolloutPool``: start or join a pool, and call it. The only place where actors are made.

Methods return Ray object references, so ``ray.get(x)`` and ``await x`` both work.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from rollout_workers import cluster, lease, models
from rollout_workers.buffer import Buffer
from rollout_workers.config import PoolConfig
from rollout_workers.controller import Controller
from rollout_workers.errors import Conflict, NotFound, StartFailed
from rollout_workers.router import Router
from rollout_workers.worker import Worker

Json = dict[str, Any]
Event = Callable[[str], None]
_HEAD = "node:__internal_head__"  # every head node offers one of it
_CONTROL = "rollout_control"
_GONE_S = 60.0


class RolloutPool:
    """A pool of workers as the trainer sees it. Use as a context manager, or call ``stop``."""

    def __init__(self, name: str) -> None:
        """Join a running pool; ``start`` and ``connect`` call this."""
        self.name = name
        self._controller = _actor(name, "controller")
        self._router = _actor(name, "router.0")
        self._buffer = _actor(name, "buffer")
        self._anchor: Any = None
        self._ray: cluster.PrivateRay | None = None
        self.url: str | None = None

    @classmethod
    def start(
        cls,
        config: PoolConfig | str | Path | Mapping[str, Any],
        on_event: Event = lambda event: None,
    ) -> RolloutPool:
        """Start a pool and return when every worker serves. Blocks; ``on_event`` gets each step.

        Raises:
            ConfigError: the configuration cannot work. ModelNotFound: no such model.
            StartFailed: an engine did not start; the message begins with the cause.
            Conflict: a pool of that name runs already.
        """
        if not isinstance(config, PoolConfig):
            config = PoolConfig.load(config)
        if config.engine.device == "cpu" or not ray.is_initialized():
            on_event(f"model {config.engine.model}")
            models.resolve(config.engine.model, progress=on_event)
        on_event("joining Ray, or starting a private one")
        local = cluster.join(config.ray, config.name)
        try:
            pool = _build(cls, config, on_event)
        except BaseException:
            if local:
                local.close()
            raise
        pool._ray = local
        return pool

    @classmethod
    def connect(cls, name: str = "policy", address: str | None = None) -> RolloutPool:
        """Join a pool that another process started.

        Raises:
            NotFound: no pool of that name in the cluster.
        """
        cluster.reach(name, address)
        pool = cls(name)
        pool.url = ray.get(pool._router.status.remote())["url"]
        return pool

    def respond(
        self,
        body: Mapping[str, Any],
        session_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        record: bool = True,
    ) -> Any:
        """Answer a Responses body in a session; see ``Router.respond``."""
        return self._router.respond.remote(body, session_id, group_id, group_size, record)

    def open_session(self, session_id: str, **declaration: Any) -> Any:
        """Declare a session before its first request; see ``Router.open_session``."""
        return self._router.open_session.remote(session_id, **declaration)

    def finish(
        self, session_id: str | None = None, reward: float | None = None, **outcome: Any
    ) -> Any:
        """Turn a session into rows; see ``Router.finish``."""
        return self._router.finish.remote(session_id, reward, **outcome)

    def take(
        self,
        n: int | None = None,
        *,
        groups: int | None = None,
        wait_s: float = 0.0,
        consumer: str = "trainer",
    ) -> Any:
        """Lease trajectories or whole groups as a ``Batch``; see ``Buffer.take``."""
        return self._buffer.take.remote(n, groups, wait_s, consumer)

    def status(self) -> Any:
        """State, load, version, address and age of every part."""
        return self._controller.status.remote()

    def stop(self) -> Any:
        """Stop engines and actors; resolves when no engine is left.

        It resolves to ``{"unread": n, "spool": path}``: how many trajectories nobody acknowledged.
        """
        return self._controller.end.remote()

    def wait(self) -> None:
        """Block until the pool ends, for example because somebody stopped it."""
        with contextlib.suppress(RayError):
            ray.get(self._controller.hold.remote())

    def close(self) -> Json:
        """Stop the pool, wait until its actors are gone, and end a Ray that ``start`` began.

        Returns what ``stop`` resolves to, or nothing if the pool had ended before.
        """
        word: Json = {}
        with contextlib.suppress(RayError):
            word = ray.get(self.stop(), timeout=_GONE_S) or {}
        for actor in (self._controller, self._anchor):
            with contextlib.suppress(RayError, ValueError):
                if actor is not None:
                    ray.kill(actor)
        if self._ray is not None:
            self._ray.close()
        return word

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _build(cls: type[RolloutPool], config: PoolConfig, on_event: Event) -> RolloutPool:
    if _lookup(config.name, "controller") is not None:
        raise Conflict(
            f"a pool named {config.name!r} runs already: connect to it, stop it with "
            f"`rollout-workers stop {config.name}`, or choose another name"
        )
    anchor = None if config.shared else ray.remote(lease.Anchor).options(num_cpus=0).remote()
    made: list[Any] = []
    try:
        router = _make(config, "router.0", Router, made, 0, config, True)
        buffer = _make(config, "buffer", Buffer, made, config.buffer)
        spawn = functools.partial(_spawn_worker, config, anchor)
        controller = _make(config, "controller", Controller, made, config, spawn, [router], buffer)
        if anchor is not None:
            for actor in made:
                actor.tie.remote(anchor)
        on_event(f"starting {config.workers.count} engine(s) with {config.engine.model}")
        started = time.monotonic()
        engines = controller.start.remote()  # by far the longest step: the others go on meanwhile
        ray.get(buffer.open.remote(ray.get(router.load.remote()), buffer))
        url = ray.get(router.start.remote(buffer))
        ray.get(engines)
        on_event(f"engines ready after {time.monotonic() - started:.0f} s")
    except BaseException as error:
        for actor in reversed(made):
            with contextlib.suppress(RayError):
                ray.get(actor.stop.remote(), timeout=_GONE_S)
            ray.kill(actor)
        if isinstance(error, RayError):
            raise _cause(error) from None
        raise
    pool = cls(config.name)
    pool._anchor, pool.url = anchor, url
    return pool


def _cause(error: RayError) -> BaseException:
    """Our own error inside Ray's, or one of ours that tells Ray's in a line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    return StartFailed(f"the pool could not start: {str(error).strip().splitlines()[-1]}")


def _make(config: PoolConfig, role: str, kind: type, made: list[Any], *args: Any) -> Any:
    """A detached control actor, on a node that never scales away and without a GPU in sight."""
    offered = ray.cluster_resources()
    place = _CONTROL if _CONTROL in offered else _HEAD
    options: dict[str, Any] = {"resources": {place: 0.001} if place in offered else {}}
    if offered.get("GPU"):
        options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
    actor = _detached(config, role, kind, **options).remote(*args)
    made.append(actor)
    return actor


def _spawn_worker(config: PoolConfig, anchor: Any, name: str, router_nodes: tuple[str, ...]) -> Any:
    """The controller's way to make a worker actor."""
    role = name.removeprefix(f"{config.name}.")
    gpus = config.engine.tensor_parallel if config.engine.device == "cuda" else 0
    options: dict[str, Any] = {"num_gpus": gpus, "resources": config.workers.resources}
    if config.workers.label_selector:
        options["label_selector"] = config.workers.label_selector
    worker = _detached(config, role, Worker, **options).remote(name, config.engine, router_nodes)
    if anchor is not None:
        worker.tie.remote(anchor)
    return worker


def _detached(config: PoolConfig, role: str, kind: type, **options: Any) -> Any:
    return ray.remote(_leased(kind)).options(
        name=f"{config.name}.{role}",
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=10_000,
        enable_task_events=False,  # a record of every call would cost more than the call's routing
        **options,
    )


def _leased(kind: type) -> type:
    """The class with a life line: it ends when the driver's anchor does, or when told to."""

    class Leased(kind):  # type: ignore[misc]
        async def tie(self, anchor: Any) -> None:
            self._ending = asyncio.create_task(lease.end_with(anchor, self.stop), name="lease")

        async def hold(self) -> None:
            await asyncio.Event().wait()

        async def end(self) -> Any:
            word = await self.shutdown()
            self._ending = asyncio.create_task(lease.leave(self.stop, after_s=0.2), name="leave")
            return word

        async def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    Leased.__name__ = Leased.__qualname__ = kind.__name__
    return Leased


def _lookup(name: str, role: str) -> Any:
    with contextlib.suppress(ValueError):
        return ray.get_actor(f"{name}.{role}", namespace=cluster.NAMESPACE)
    return None


def _actor(name: str, role: str) -> Any:
    actor = _lookup(name, role)
    if actor is None:
        raise NotFound(
            f"no pool named {name!r} in this cluster; start one with `rollout-workers serve CONFIG`"
        )
    return actor
