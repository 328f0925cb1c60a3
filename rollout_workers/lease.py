"""The life line of a pool: its actors are detached, and end when their driver's anchor does.

A call that never returns is left running on the anchor. Ray ends it with an error as soon as the
anchor's process is gone, whatever ended the driver, so nothing needs to poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorDiedError, RayError

_log = logging.getLogger(__name__)
_STOP_S = 20.0


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
