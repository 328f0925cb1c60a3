"""One engine process: launched, watched until it serves, ended without a trace.

The engine shares its actor's process group, and each of its Pythons dies with its parent
(``server_site``), so nothing outlives the actor however that ends. A failed start is raised as
``StartFailed`` with the cause from the engine's own log. What the engine is asked to generate is
not this module's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rollout_workers.config import EngineConfig
from rollout_workers.diagnosis import Cause, Diagnosis, diagnose, ended
from rollout_workers.errors import StartFailed
from rollout_workers.launch import Launch, check, command, environment, popen, write_keys
from rollout_workers.node import log_tail, new_log, new_run_dir, node_dir
from rollout_workers.ports import PortLease
from rollout_workers.processes import Record, send

logger = logging.getLogger(__name__)

_PORT_TRIES = 4
_POLL_S = 0.2
_REFRESH_STARTING_S, _REFRESH_S = 1.0, 15.0  # how old the record of the tree may be
_KILL_S = 10.0
_HTTP_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a running engine says of its room, in tokens."""

    context_length: int
    max_prompt_tokens: int
    max_total_tokens: int


class _PortTaken(Exception):
    """The start failed only because another program took a port."""


class Server:
    """Owns one engine process, its ports, keys, log, and everything it leaves on the node.

    It starts once. The thread that calls ``start`` must live as long as the engine: the kernel
    ends the engine together with the thread that started it.
    """

    def __init__(
        self, name: str, config: EngineConfig, *, api_key: str, admin_key: str, host: str
    ) -> None:
        self.name = name
        self.api_key, self.admin_key = api_key, admin_key
        self.log_path = new_log(name, config.log_dir)
        self.port = 0
        self._config, self._host = config, host
        self._launch: Launch | None = None
        self._ports: PortLease | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._record: Record | None = None
        self._ready = False
        self.stopping = self.ended = False
        self._ending = asyncio.Lock()

    def __repr__(self) -> str:
        state = "serving" if self._ready else "stopping" if self.stopping else "not serving"
        return f"Server({self.name}, {self.url}, pid={self.pid}, {state})"

    @property
    def url(self) -> str:
        """Where the engine answers."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """The engine's main process; 0 before it was started."""
        return self._process.pid if self._process else 0

    async def start(
        self, model: Path | str, *, version: int = 0, dtype: str | None = None
    ) -> EngineLimits:
        """Launch the engine and wait until it serves; ``dtype`` holds if the config has none.

        Raises:
            StartFailed: it cannot; the message begins with the cause.
            ConfigError: ``engine.args`` sets a flag that is not the user's.
        """
        check(self._config, str(model), os.environ)
        try:
            return await self._start_on_free_ports(str(model), version, dtype)
        except BaseException:
            await self._destroy()
            self.ended = True
            raise

    async def wait_exit(self, on_exit: Callable[[int], object] | None = None) -> int:
        """Wait until the engine's main process ends, clean up after it; returns its exit code.

        ``on_exit`` gets the code at once: the clean-up may take seconds.
        """
        if self._process is None:
            raise StartFailed(f"{self.name} was never started")
        while (code := self._process.poll()) is None:
            await self._refresh(_REFRESH_S)
            await asyncio.sleep(_POLL_S)
        if on_exit is not None:
            on_exit(code)
        await self._destroy()
        self.ended = True
        return code

    async def stop(self, grace_s: float = 6.0) -> None:
        """End the engine and remove what it left; safe at any time and any number of times.

        A serving engine has ``grace_s`` to end by itself after its requests were aborted; what
        lives then is killed.
        """
        self.stopping = True
        try:
            if self._ready and grace_s > 0:
                await self._ask_to_end(grace_s)
        finally:
            await self._destroy()
            self.ended = True

    def tail(self, lines: int = 50) -> list[str]:
        """The last lines of the engine's log, without keys."""
        return log_tail(self.log_path, lines, (self.api_key, self.admin_key))

    def diagnose(self) -> Diagnosis:
        """Why the engine ended, or what its log says so far."""
        return diagnose(self.tail(2000), self._exit_code())

    async def _start_on_free_ports(
        self, model: str, version: int, dtype: str | None
    ) -> EngineLimits:
        for left in reversed(range(_PORT_TRIES)):
            try:
                self._spawn(model, version, dtype)
                return await self._wait_until_serving()
            except _PortTaken as error:
                if not left:
                    raise StartFailed(f"{error}; {_PORT_TRIES} pairs of ports tried") from None
                logger.warning("engine.port_taken worker=%s: %s; trying others", self.name, error)
                await self._destroy()
                if self._record:
                    raise StartFailed(f"{error}, and its process cannot be killed") from None
        raise AssertionError("the last try returns or raises")

    def _spawn(self, model: str, version: int, dtype: str | None) -> None:
        self._raise_if_stopping()
        self._ports = PortLease(node_dir("ports"), 2)
        self.port, nccl_port = self._ports.ports
        self._launch = launch = Launch(
            model_path=model,
            host=self._host,
            port=self.port,
            nccl_port=nccl_port,
            version=version,
            dtype=self._config.dtype or dtype,
            run_dir=new_run_dir(),
            api_key=self.api_key,
            admin_key=self.admin_key,
        )
        write_keys(launch)
        argv = command(self._config, launch)
        env = environment(self._config, launch, os.environ)
        self._process = popen(argv, env, self.log_path)
        self._record = Record(self._process.pid, launch.run_dir)
        logger.info("engine.launched worker=%s pid=%d url=%s", self.name, self.pid, self.url)

    async def _wait_until_serving(self) -> EngineLimits:
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._session() as session:
                while (limits := await self._limits(session)) is None:
                    self._raise_if_ended()
                    await self._refresh(_REFRESH_STARTING_S)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            slow = f"not serving after engine.start_timeout_s = {limit_s:g}"
            raise StartFailed(f"{self.diagnose()} ({slow}; log: {self.log_path})") from None
        await self._refresh(0)
        self._raise_if_stopping()
        self._ready = True
        return limits

    def _raise_if_stopping(self) -> None:
        if self.stopping:
            raise StartFailed(f"{self.name} was stopped while it started")

    def _raise_if_ended(self) -> None:
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._raise_if_stopping()
        found = self.diagnose()
        if found.cause is Cause.PORT:
            raise _PortTaken(str(found))
        raise StartFailed(f"{found} ({ended(code)}; log: {self.log_path})")

    def _session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        return aiohttp.ClientSession(self.url, headers=headers)

    async def _limits(self, session: aiohttp.ClientSession) -> EngineLimits | None:
        """The limits if our engine serves, else None.

        ``/ready`` only reads flags; ``/health`` would generate, and mark an engine that is slow at
        its first token as ill. Whatever else answers on our port is not ours: then our own engine
        ends, and says that the port was taken.
        """
        try:
            await _get(session, "/ready", as_json=False)
            info = await _get(session, "/server_info")
            models = await _get(session, "/v1/models")
            if self._launch is None or info["nccl_port"] != self._launch.nccl_port:
                return None
            return EngineLimits(
                context_length=int(models["data"][0]["max_model_len"]),
                max_prompt_tokens=int(info["max_req_input_len"]),
                max_total_tokens=int(info["max_total_num_tokens"]),
            )
        except (*_HTTP_ERRORS, ValueError, LookupError, TypeError):
            return None

    async def _ask_to_end(self, grace_s: float) -> None:
        process, deadline = self._process, time.monotonic() + grace_s
        if process is None or process.poll() is not None:
            return
        await self._refresh(0)
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        with contextlib.suppress(*_HTTP_ERRORS):
            async with asyncio.timeout(min(2.0, grace_s)), self._session() as session:
                await session.post("/abort_request", json={"abort_all": True}, headers=headers)
        process.send_signal(signal.SIGINT)  # SIGTERM drains in steps of 5 s
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _destroy(self) -> None:
        """Kill what is left of the tree, then remove every trace but the log.

        What cannot be killed keeps its traces: the record, by which a later sweep finds it, and
        the ports it may still hold.
        """
        self._ready = False
        async with self._ending:
            if self._record:
                if not await self._kill(self._record):
                    logger.error("engine.unkillable worker=%s pid=%d", self.name, self.pid)
                    return
                self._record.remove()
                self._record = None
            if self._launch:
                shutil.rmtree(self._launch.run_dir, ignore_errors=True)
                self._launch = None
            if self._ports:
                self._ports.release()
                self._ports = None

    async def _kill(self, record: Record) -> bool:
        """Kill the tree; returns whether nothing of it runs any more."""
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            # Each time: a process that dies may have just made another.
            with contextlib.suppress(OSError):  # the record could not be written
                await asyncio.to_thread(record.refresh)
            send(record.processes, signal.SIGKILL)
            if not record.alive and self._exit_code() is not None:  # which reaps it
                return True
            await asyncio.sleep(0.05)
        return not record.alive

    def _exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    async def _refresh(self, after_s: float) -> None:
        if self._record and self._record.age_s >= after_s:
            await asyncio.to_thread(self._record.refresh)


async def _get(session: aiohttp.ClientSession, path: str, as_json: bool = True) -> Any:
    timeout = aiohttp.ClientTimeout(total=10 if as_json else 2)
    async with session.get(path, raise_for_status=True, timeout=timeout) as reply:
        return await reply.json() if as_json else None
