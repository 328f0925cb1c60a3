"""The scripted engine's HTTP application: SGLang's endpoints, keys, streams and aborts.

What is answered comes from ``scripted_replies``. Beyond SGLang's endpoints there are GET /recorded
and POST /script.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from typing import Any

import msgspec
import orjson
from aiohttp import web
from scripted_replies import ABORTED, Generation, Json, Reply, Script, Writer, meta_info, refusal

_OPEN = ("/health", "/ready", "/metrics", "/recorded", "/script")
_ADMIN = (
    "abort_request",
    "flush_cache",
    "pause_generation",
    "continue_generation",
    "update_weights_from_disk",
    "update_weight_version",
)
_LOOKS = ("model_info", "server_info", "v1/models", "v1/loads")


class Engine:
    """Owns the state of one scripted server: script, keys, version, requests."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        version: str = "default",
        context_length: int = 8192,
        model: str = "scripted",
        flags: Json | None = None,
    ) -> None:
        self.script = script or Script()
        self.version, self.model, self.context_length = version, model, context_length
        self.recorded: deque[Json] = deque(maxlen=20_000)
        self.running: dict[str, asyncio.Event] = {}
        self.is_program = False
        self._keys = (api_key, admin_key)
        self._flags = flags or {}
        self._writer = Writer(self.script)
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._auth])
        app.router.add_get("/{path:health|health_generate}", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/recorded", self._recorded)
        app.router.add_post("/script", self._set_script)
        app.router.add_post("/generate", self._generate)
        for name in _LOOKS:
            app.router.add_get(f"/{name}", getattr(self, f"_{name.replace('/', '_')}"))
        for name in _ADMIN:
            app.router.add_route("*", f"/{name}", self._control)
        return app

    @web.middleware
    async def _auth(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key, admin = self._keys
        wanted = (admin or key) if request.path[1:] in _ADMIN else key
        given = request.headers.get("Authorization", "").partition(" ")[2]
        if wanted and given != wanted and not request.path.startswith(_OPEN):
            return _json({"error": "Unauthorized"}, 401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self._record(request.path, body)
        reply = self.script.replies.pop(0) if self.script.replies else Reply()
        rid = body.get("rid") or os.urandom(8).hex()
        if rid in self.running:
            return _json({"error": {"message": "Duplicate request ID detected"}}, 400)
        self.running[rid] = asyncio.Event()
        try:
            await self._unpaused.wait()
            return await self._answer(request, body, reply, rid)
        finally:
            del self.running[rid]

    async def _answer(
        self, request: web.Request, body: Json, reply: Reply, rid: str
    ) -> web.StreamResponse:
        prompt, sampling = body["input_ids"], body.get("sampling_params", {})
        if problem := refusal(prompt, sampling, self.context_length):
            error: Json = {"error": {"message": problem, "code": 400}}
            return await _stream(request, [error]) if body.get("stream") else _json(error, 400)
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.script.vocab_size:
            self._die(request)
        early = reply.fault if not (body.get("stream") and reply.after) else None
        if early and (response := await self._fault(request, reply, rid)):
            return response
        made = self._writer.generation(prompt, sampling, reply)
        delay_s = self.script.delay_s if reply.delay_s is None else reply.delay_s
        await self._sleep(rid, delay_s)
        if body.get("stream"):
            return await self._events(request, body, reply, rid, made)
        return _raw(await self._whole(body, reply, rid, made))

    async def _whole(self, body: Json, reply: Reply, rid: str, made: Generation) -> bytes:
        started, each_s = time.monotonic(), self.script.token_delay_s
        await self._sleep(rid, each_s * len(made.ids))
        count, reason = len(made.ids), made.reason
        if self.running[rid].is_set() and reason["type"] != "abort":
            count = int((time.monotonic() - started) / each_s) if each_s else 0
            reason = ABORTED
        meta = meta_info(rid, body["input_ids"], count, self.version, reason) | reply.meta
        return self._writer.body(made.ids[:count], made.logprobs, meta)

    async def _events(
        self, request: web.Request, body: Json, reply: Reply, rid: str, made: Generation
    ) -> web.StreamResponse:
        response, chunk = await _open_stream(request), bytearray()
        interval = body.get("sampling_params", {}).get("stream_interval") or 1
        edges = [0, *range(1, len(made.ids), interval), len(made.ids)]
        for begin, end in itertools.pairwise(edges):
            if self.script.token_delay_s or (reply.fault and begin >= reply.after):
                await response.write(bytes(chunk))
                chunk.clear()
                await self._sleep(rid, self.script.token_delay_s * (end - begin))
            if reply.fault and begin >= reply.after > 0:
                await self._fault(request, reply, rid)
            cut = self.running[rid].is_set()
            upto = begin if cut else end
            reason = ABORTED if cut else made.reason if end == len(made.ids) else None
            meta = meta_info(rid, body["input_ids"], upto, self.version, reason) | reply.meta
            logprobs = made.logprobs and made.logprobs[begin:upto]
            chunk += b"data: %b\n\n" % self._writer.body(made.ids[begin:upto], logprobs, meta)
            if reason:
                break
        await response.write(bytes(chunk) + b"data: [DONE]\n\n")
        return response

    async def _sleep(self, rid: str, seconds: float) -> None:
        """Wait as long as that, or until the request is aborted."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.running[rid].wait(), seconds)

    async def _fault(self, request: web.Request, reply: Reply, rid: str) -> web.Response | None:
        match reply.fault:
            case "status":
                text = reply.body or '{"error":{"message":"scripted"}}'
                return _raw(text.encode(), reply.status)
            case "garbage":
                return _raw((reply.body or '{"text": "cut').encode())
            case "drop":
                _cut(request)
            case "hang":
                await self.running[rid].wait()
            case "exit":
                self._die(request)
        return None

    def _die(self, request: web.Request) -> None:
        """As stock SGLang: the process ends, and open connections get no answer."""
        if self.is_program:
            os._exit(1)
        _cut(request)

    async def _control(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = orjson.loads(raw) if raw else {}
        self._record(request.path, body)
        match request.path[1:]:
            case "abort_request":
                self._abort(body)
                return web.Response()
            case "pause_generation":
                self._unpaused.clear()
                self._abort({"abort_all": body.get("mode", "abort") == "abort"})
            case "continue_generation":
                self._unpaused.set()
            case "update_weights_from_disk":
                self.model = body["model_path"]
                self._abort({"abort_all": body.get("abort_all_requests", False)})
                self.version = str(body.get("weight_version") or self.version)
            case "update_weight_version":
                self._abort({"abort_all": body.get("abort_all_requests", True)})
                self.version = str(body["new_version"])
        return _json({"success": True, "message": "Success", "status": "ok"})

    def _abort(self, body: Json) -> None:
        for rid, aborted in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                aborted.set()

    def _record(self, path: str, body: Json) -> None:
        entry = {"path": path, "body": body}
        self.recorded.append(entry)
        if self.script.record_file:
            with open(self.script.record_file, "ab") as file:
                file.write(orjson.dumps(entry) + b"\n")

    async def _recorded(self, _: web.Request) -> web.Response:
        return _json(list(self.recorded))

    async def _set_script(self, request: web.Request) -> web.Response:
        self.script = msgspec.json.decode(await request.read(), type=Script)
        self._writer = Writer(self.script)
        return _json({})

    async def _health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.script.health_delay_s)
        return web.Response(status=200 if self._unpaused.is_set() else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._unpaused.is_set() else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        info = {"model_path": self.model, "served_model_name": self.model}
        return _json(info | {"weight_version": self.version, "is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        limits = {"max_req_input_len": self.context_length - 6, "max_total_num_tokens": 32768}
        return _json(self._flags | limits | {"version": "0.5.23", "status": "ready"})

    async def _v1_models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "max_model_len": self.context_length}
        return _json({"object": "list", "data": [model]})

    async def _v1_loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0, "token_usage": 0.0}
        return _json({"loads": [load | {"num_used_tokens": 0, "max_total_num_tokens": 32768}]})


def _json(value: object, status: int = 200) -> web.Response:
    return _raw(orjson.dumps(value), status)


def _raw(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _cut(request: web.Request) -> None:
    if request.transport:
        request.transport.abort()
    raise ConnectionResetError("scripted")


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def _stream(request: web.Request, events: list[Json]) -> web.StreamResponse:
    response = await _open_stream(request)
    lines = [b"data: %b\n\n" % orjson.dumps(event) for event in events]
    await response.write(b"".join([*lines, b"data: [DONE]\n\n"]))
    return response
