"""A reverse proxy before real engines that keeps what they were asked and answered."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from rollout_workers.routing import WorkerInfo


@dataclass
class Recorder:
    """Context manager; ``calls`` are (request, reply) of every ``/generate``, in order of reply."""

    workers: list[WorkerInfo]
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __enter__(self) -> list[WorkerInfo]:
        """The workers as a router should see them: behind this proxy."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return [replace(w, url=f"{self._url}/{w.name}") for w in self.workers]

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{worker}/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = "http://{}:{}".format(*runner.addresses[0][:2])
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            self._ready.set()
            await self._end.wait()
        await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.Response:
        name, path = request.match_info["worker"], request.match_info["path"]
        worker = next(w for w in self.workers if w.name == name)
        body = await request.read()
        headers = {k: request.headers[k] for k in ("Authorization", "Content-Type")}
        async with self._http.post(f"{worker.url}/{path}", data=body, headers=headers) as reply:
            raw = await reply.read()
            if path == "generate" and reply.status == 200:
                self.calls.append((msgspec.json.decode(body), msgspec.json.decode(raw)))
            return web.Response(body=raw, status=reply.status, content_type="application/json")
