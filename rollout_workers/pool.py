"""``RolloutPool``: start or join a pool, and call it. The only place where actors are made.

Methods return Ray object references, so ``ray.get(x)`` and ``await x`` both work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from rollout_workers import cluster, lease, models
from rollout_workers.buffer import Buffer
from rollout_workers.config import PoolConfig
from rollout_workers.controller import Controller
from rollout_workers.errors import Conflict, NotFound, RolloutError, StartFailed
from rollout_workers.router import Router
from rollout_workers.worker import Worker

Json = dict[str, Any]
Event = Callable[[str], None]
_HEAD = "node:__internal_head__"  # every head node offers one of it
_CONTROL = "rollout_control"
_log = logging.getLogger(__name__)


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
            NotFound: no pool of that name in the cluster, or only what is left of one.
        """
        cluster.reach(name, address)
        pool = cls(name)
        try:
            pool.url = ray.get(pool._router.status.remote())["url"]
        except RayError as error:
            raise _cause(error, f"the router of pool {name!r} does not answer") from None
        return pool

    @classmethod
    def end(cls, name: str, address: str | None = None) -> Json:
        """Stop a pool by name, also one whose controller is lost; returns what ``close`` does.

        Raises:
            NotFound: nothing of that name is in the cluster.
        """
        cluster.reach(name, address)
        if not lease.actors_of(name, cluster.NAMESPACE):
            _actor(name, "controller")
        return lease.end(name, cluster.NAMESPACE, _lookup(name, "controller"))

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
        """Block until somebody stops the pool.

        Raises:
            RolloutError: its controller was lost.
        """
        while True:
            try:
                return ray.get(self._controller.hold.remote())
            except ActorUnavailableError:  # not dead: Ray itself decides after some tries
                time.sleep(0.5)
            except RayError as error:
                raise RolloutError(
                    f"the controller of pool {self.name!r} was lost: {_text(error)}",
                    None,
                    "pool_lost",
                ) from None

    def close(self) -> Json:
        """Stop the pool, wait until its actors are gone, and end a Ray that ``start`` began.

        Returns what ``stop`` resolves to, or nothing if the pool had ended before. Actors that did
        not go with their controller are in ``cleared``, those that still live in ``left``.
        """
        try:
            word = lease.end(self.name, cluster.NAMESPACE, self._controller)
        finally:
            if self._ray is not None:
                self._ray.close()
            elif self._anchor is not None:
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(self._anchor)
        if self._ray is None and word.get("left"):
            _log.error("pool.not_stopped name=%s left=%s", self.name, ",".join(word["left"]))
        return word if self._ray is None else {k: v for k, v in word.items() if k != "left"}

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
    if _lookup(config.name, "controller") or lease.wait_gone(config.name, cluster.NAMESPACE):
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
        address = ray.get(router.address.remote(config.router.http.host))
        url = ray.get(router.start.remote(buffer, address))
        ray.get(engines)
        on_event(f"engines ready after {time.monotonic() - started:.0f} s")
    except BaseException as error:
        whole = len(made) == 3  # the controller was made last: all names are ours
        lease.abandon(made, anchor, (config.name, cluster.NAMESPACE) if whole else None)
        if isinstance(error, Exception):
            raise _cause(error) from None
        raise
    pool = cls(config.name)
    pool._anchor, pool.url = anchor, url
    return pool


def _cause(error: Exception, what: str = "the pool could not start") -> RolloutError:
    """Our own error, maybe from inside Ray's, or one of ours that tells another in a line."""
    cause = getattr(error, "cause", None) if isinstance(error, RayError) else error
    if isinstance(cause, RolloutError):
        return cause
    return StartFailed(f"{what}: {_text(cause or error)}")


def _text(error: BaseException) -> str:
    """Type and last line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['-'])[-1].strip()}"


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
    return ray.remote(lease.leased(kind)).options(
        name=f"{config.name}.{role}",
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        # No limit: the roster, status and finish must get through however many calls are open. A
        # concurrency group for them would be another event loop next to the actor's state.
        max_concurrency=1_000_000,
        enable_task_events=False,  # a record of every call would cost more than the call's routing
        **options,
    )


def _lookup(name: str, role: str) -> Any:
    with contextlib.suppress(ValueError):
        return ray.get_actor(f"{name}.{role}", namespace=cluster.NAMESPACE)
    return None


def _actor(name: str, role: str) -> Any:
    actor = _lookup(name, role)
    if actor is not None:
        return actor
    if left := lease.actors_of(name, cluster.NAMESPACE):
        raise NotFound(
            f"pool {name!r} has lost its {role}; {', '.join(sorted(left))} still run: end them "
            f"with `rollout-workers stop {name}`"
        )
    raise NotFound(
        f"no pool named {name!r} in this cluster; start one with `rollout-workers serve CONFIG`"
    )
