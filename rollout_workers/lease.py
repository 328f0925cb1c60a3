"""How a pool's actors end: they are detached, and end when their driver's anchor does, or by name.

A call that never returns is left running on the anchor. Ray ends it with an error as soon as the
anchor's process is gone, whatever ended the driver, so nothing needs to poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, RayError

_log = logging.getLogger(__name__)
_STOP_S = 20.0
_LEAVING_S = 3.0  # how long actors that were ended may be listed
# Ending a pool takes its controller at most the sum of these: telling the routers, then workers and
# routers at once, then the buffer. A worker needs up to 18 s: see ``Server.stop``.
TELL_S, STOP_S, BUFFER_S = 5.0, 25.0, 15.0
_END_S = TELL_S + STOP_S + BUFFER_S + 10.0
_GONE_S = 10.0  # how long Ray may take to forget the name of an actor that was ended


class Anchor:
    """Owns nothing: it lives as long as the driver's job."""

    async def hold(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()


async def until_gone(anchor: Any) -> None:
    """Return when the anchor is dead; a connection that only stutters is tried again."""
    while True:
        try:
            await anchor.hold.remote()
        except ActorDiedError:
            return
        except RayError as error:  # unavailable is not dead: Ray itself decides after some tries
            _log.warning("anchor.unreachable error=%s", type(error).__name__)
            await asyncio.sleep(0.5)


async def end_with(anchor: Any, stop: Callable[[], Awaitable[None]]) -> None:
    """Wait for the anchor's end, run ``stop``, then end this process."""
    await until_gone(anchor)
    _log.warning("anchor.gone")
    await leave(stop)


async def leave(stop: Callable[[], Awaitable[None]], after_s: float = 0.0) -> None:
    """Run ``stop`` within bounds, then end this actor's process and free its name.

    ``after_s`` leaves time for the answer of the call that asked for it.
    """
    await asyncio.sleep(after_s)
    try:
        async with asyncio.timeout(_STOP_S):
            with contextlib.suppress(Exception):
                await stop()
    finally:
        signal.alarm(5)  # a worker process that hangs in its own clean-up ends by this
        os.kill(os.getpid(), signal.SIGTERM)


def leased(kind: type) -> type:
    """The class with a life line: it ends when the driver's anchor does, or when told to."""

    class Leased(kind):  # type: ignore[misc]
        _over: asyncio.Event | None = None

        async def tie(self, anchor: Any) -> None:
            self._ending = asyncio.create_task(end_with(anchor, self.stop), name="lease")

        async def hold(self) -> None:
            """Returns when ``end`` has ended the pool; an error says that this actor was lost."""
            self._over = self._over or asyncio.Event()
            await self._over.wait()

        async def end(self) -> Any:
            word = await self.shutdown()
            self._over = self._over or asyncio.Event()
            self._over.set()
            await asyncio.sleep(0.1)  # whoever holds hears of it before this actor is killed
            self._ending = asyncio.create_task(leave(self.stop, after_s=0.5), name="leave")
            return word

        async def address(self, host: str) -> str | None:
            return node_address(v6=":" in host)

        async def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    Leased.__name__ = Leased.__qualname__ = kind.__name__
    return Leased


def abandon(made: list[Any], anchor: Any, pool: tuple[str, str] | None) -> None:
    """End what a failed start made; its engines first, and not with the driver but now.

    ``pool`` is its name and namespace if the controller, the last of ``made``, came to be.
    """
    if pool:
        with contextlib.suppress(RayError):
            ray.get(made[-1].stop_workers.remote(), timeout=_END_S)
    end_all(made)
    if pool:
        clear(*pool)
    if anchor is not None:
        ray.kill(anchor)


def end(name: str, namespace: str, controller: Any) -> dict[str, Any]:
    """Stop a pool through its controller, if it has one, and whatever that leaves."""
    if not ray.is_initialized():  # shut down before: asking now would start another
        return {}
    word: dict[str, Any] = {}
    if controller is not None:
        with contextlib.suppress(RayError):
            word = ray.get(controller.end.remote(), timeout=_END_S) or {}
        with contextlib.suppress(RayError, ValueError):
            ray.kill(controller)
    return {**word, **clear(name, namespace)}


def actors_of(name: str, namespace: str) -> dict[str, Any]:
    """Handles of all actors of a pool that live, by name; works without its controller."""
    ours = re.compile(rf"{re.escape(name)}\.(controller|buffer|router\.\d+|worker\.\d+)")
    found: dict[str, Any] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        actor = cast("dict[str, str]", entry)
        if actor["namespace"] == namespace and ours.fullmatch(actor["name"]):
            with contextlib.suppress(ValueError):  # it has just ended
                found[actor["name"]] = ray.get_actor(actor["name"], namespace=namespace)
    return found


def end_all(actors: Iterable[Any]) -> list[Any]:
    """Let actors stop in order, all at once, then end them; returns what ``stop`` said."""
    actors = list(actors)
    stops = []
    for actor in actors:
        with contextlib.suppress(RayError):
            stops.append(actor.stop.remote())
    words = []
    for stopped in ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)[0] if stops else []:
        with contextlib.suppress(RayError):
            words.append(ray.get(stopped))
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)
    return words


def clear(name: str, namespace: str) -> dict[str, Any]:
    """End what is left of a pool, but for actors that are about to go.

    ``cleared`` names the actors that had to be ended here, ``left`` those that still live.
    """
    if not (found := wait_gone(name, namespace)):
        return {}
    word: dict[str, Any] = {}
    for said in end_all(found.values()):
        word |= said if isinstance(said, dict) else {}
    return {**word, "cleared": sorted(found), "left": sorted(wait_gone(name, namespace, _GONE_S))}


def wait_gone(name: str, namespace: str, seconds: float = _LEAVING_S) -> dict[str, Any]:
    """Actors of a pool that live on for ``seconds``."""
    deadline = time.monotonic() + seconds
    while (found := actors_of(name, namespace)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def node_address(v6: bool) -> str | None:
    """An address at which others reach this node, None if it has none of that kind."""
    address = str(ray.util.get_node_ip_address())
    if v6 == (":" in address):
        return address
    try:
        family = socket.AF_INET6 if v6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(("2001:db8::1" if v6 else "192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None
