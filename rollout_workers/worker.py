"""The actor that owns one engine: finds its model on this node, starts, watches and stops it.

A worker knows no conversation and no other worker. It is a plain class; the pool makes an actor of
it. The engine is started from the actor's event loop, whose thread lives as long as the actor.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import ray

from rollout_workers import models
from rollout_workers.config import EngineConfig
from rollout_workers.diagnosis import ended, last_line
from rollout_workers.errors import StartFailed
from rollout_workers.processes import sweep
from rollout_workers.routing import WorkerInfo
from rollout_workers.server import Server

logger = logging.getLogger(__name__)


class Worker:
    """Owns one engine on this node, and what others may know of it."""

    def __init__(
        self, name: str, config: EngineConfig, router_node_ids: tuple[str, ...] = ()
    ) -> None:
        self._name = name
        self._config = config
        self._node_id = ray.get_runtime_context().get_node_id()
        # Others can reach the engine only where one of them has to.
        remote = any(node_id != self._node_id for node_id in router_node_ids)
        self._host: str = _node_address() if remote else "127.0.0.1"
        self._server: Server | None = None
        self._info: WorkerInfo | None = None
        self._clearing: asyncio.Task[int] | None = None

    async def start(self, version: int = 0) -> WorkerInfo:
        """Start the engine, its weights labelled ``version``, and return how to reach it.

        Raises:
            ModelNotFound: no such model on this node.
            ConfigError: ``engine.args`` sets a flag that is not the user's.
            StartFailed: the engine cannot start; the message begins with the cause.
        """
        if self._clearing:
            await asyncio.shield(self._clearing)
        if self._server and not self._server.ended:
            raise StartFailed(f"{self._name} has an engine already: stop it first")
        self._server = server = self._new_server()
        try:
            self._info = await self._start(server, version)
        except BaseException:
            await server.stop(grace_s=0)
            raise
        return self._info

    async def wait_exit(self) -> str:
        """Wait until the engine ends, and say in one sentence how and why.

        What it left is cleared meanwhile: who sends it turns should know at once.
        """
        server = self._server
        if server is None:
            return f"{self._name} has no engine"
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        clearing = asyncio.create_task(server.wait_exit(exited.set_result), name="clearing")
        await asyncio.wait({exited, clearing}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            clearing.result()  # raises: there is nothing to wait for
        code = exited.result()
        if server is self._server:
            self._info, self._clearing = None, clearing
        lines = server.tail()
        cause = "it was stopped" if server.stopping else server.diagnose()
        return f"engine of {self._name} {ended(code)}: {cause}; last log line: {last_line(lines)}"

    async def info(self) -> WorkerInfo | None:
        """How to reach the engine, or None while none serves."""
        return self._info

    async def log_tail(self, lines: int = 50) -> list[str]:
        """The last lines of the engine's log, without keys."""
        return self._server.tail(lines) if self._server else []

    async def stop(self) -> None:
        """End the engine, if there is one; safe at any time and any number of times."""
        self._info = None
        if self._server:
            await self._server.stop()

    def _new_server(self) -> Server:
        # Hexadecimal: SGLang turns its config file into flags, and a key may not begin with "-".
        api_key, admin_key = secrets.token_hex(32), secrets.token_hex(32)
        return Server(
            self._name, self._config, api_key=api_key, admin_key=admin_key, host=self._host
        )

    async def _start(self, server: Server, version: int) -> WorkerInfo:
        started_at = time.time()
        about = await asyncio.to_thread(_prepare, self._config.model)
        # SGLang's own choice for float32 is float16, which is of no use on a CPU.
        dtype = about.dtype if self._config.device == "cpu" else None
        limits = await server.start(about.path, version=version, dtype=dtype)
        return WorkerInfo(
            name=self._name,
            url=server.url,
            api_key=server.api_key,
            admin_key=server.admin_key,
            version=version,
            vocab_size=about.vocab_size,
            context_length=limits.context_length,
            max_prompt_tokens=limits.max_prompt_tokens,
            max_total_tokens=limits.max_total_tokens,
            node_id=self._node_id,
            pid=server.pid,
            started_at=started_at,
            log_path=str(server.log_path),
        )


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())


def _prepare(model: str) -> models.ModelInfo:
    """Clear the node of servers whose owners are dead, then find the model."""
    if killed := sweep():
        logger.warning("node.swept processes=%d", killed)
    return models.describe(models.resolve(model))
