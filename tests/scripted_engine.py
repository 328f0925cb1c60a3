"""A stand-in for one SGLang server, for faults and for load; it shows no truth about sampling.

It answers in SGLang's shapes, at once, what ``sample`` computes. Use it in the process (``async
with ScriptedEngine(Script(...)) as engine``) or as a program: ``python tests/scripted_engine.py``
with SGLang's flags, the script as JSON in ``--script FILE`` or in the variable
``SCRIPTED_ENGINE``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Self

import msgspec
import yaml
from aiohttp import web
from scripted_app import Engine
from scripted_replies import Json, Reply, Sample, Script, logprob_of, sample

__all__ = ["Engine", "Reply", "Sample", "Script", "ScriptedEngine", "logprob_of", "sample"]


class ScriptedEngine(Engine):
    """A scripted server in this process, on a free port of the loopback, as a context manager."""

    url: str

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        await web.SockSite(self._runner, listener).start()
        self.url = "http://{}:{}".format(*listener.getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--nccl-port", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--model-path", default="scripted")
    parser.add_argument("--script", type=Path)
    return parser.parse_known_args(argv)[0]


def _main(argv: list[str]) -> None:
    flags = _parse(argv)
    text = flags.script.read_bytes() if flags.script else os.environ.get("SCRIPTED_ENGINE", "{}")
    script = msgspec.json.decode(text, type=Script)
    context = multiprocessing.get_context("spawn")
    for _ in range(script.children):
        context.Process(target=time.sleep, args=(3600,), daemon=True).start()
    if script.start_log:
        print(script.start_log, flush=True)
    time.sleep(script.start_delay_s)
    if script.start_exit is not None:
        os._exit(script.start_exit)
    if script.ignore_signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    keys = yaml.safe_load(flags.config.read_text()) if flags.config else {}
    asyncio.run(_serve(script, flags, keys))


async def _serve(script: Script, flags: argparse.Namespace, keys: Json) -> None:
    engine = Engine(
        script,
        api_key=keys.get("api-key"),
        admin_key=keys.get("admin-api-key"),
        version=flags.weight_version,
        context_length=flags.context_length,
        model=flags.model_path,
        flags={"nccl_port": flags.nccl_port, "port": flags.port, "host": flags.host},
    )
    engine.is_program = True
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, flags.host, flags.port, backlog=2048).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    _main(sys.argv[1:])
