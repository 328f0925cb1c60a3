"""A bare aiohttp reverse proxy: the least that one more HTTP hop in Python costs.

``python jobs/bench_proxy.py TARGET`` prints its own address and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _serve(target: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def forward(request: web.Request) -> web.Response:
            headers = {name: request.headers[name] for name in ("Authorization", "Content-Type")}
            body = await request.read()
            async with http.post(target + request.path, data=body, headers=headers) as reply:
                raw = await reply.read()
                return web.Response(body=raw, status=reply.status, content_type="application/json")

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print("http://{}:{}".format(*runner.addresses[0][:2]), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
