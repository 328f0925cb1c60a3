"""The front door: OpenAI-shaped HTTP over one router, in the router's own event loop.

Every path answers errors in OpenAI's shape, unknown URLs and wrong methods included. A client that
hangs up cancels its call, which aborts the generation on the engine.
"""

from __future__ import annotations

import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from rollout_workers.config import HttpConfig
from rollout_workers.errors import BadRequest, NotFound, RolloutError, Unauthorized
from rollout_workers.identity import parse_flag, parse_size

if TYPE_CHECKING:
    from rollout_workers.router import Router

Json = dict[str, Any]
_log = logging.getLogger(__name__)
_OPEN = {"/health"}  # answered without a key, for probes
_encode = msgspec.json.Encoder().encode


async def serve(router: Router, config: HttpConfig) -> tuple[web.AppRunner, str]:
    """Listen as configured; returns the runner to clean up, and the base URL with ``/v1``.

    Raises:
        OSError: the port is taken.
    """
    runner = web.AppRunner(
        build_app(router, config), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def build_app(router: Router, config: HttpConfig) -> web.Application:
    """The aiohttp application with all routes of the front door."""
    app = web.Application(
        middlewares=[_errors, _keys(config.api_key)], client_max_size=config.max_body_bytes
    )
    door = _Door(router)
    for prefix in ("", "/s/{session}"):
        app.router.add_post(prefix + "/v1/responses", door.responses)
        app.router.add_get(prefix + "/v1/models", door.models)
    app.router.add_get("/v1/models/{model:.+}", door.model)
    app.router.add_post("/v1/sessions/{session}/finish", door.finish)
    app.router.add_get("/health", door.health)
    return app


class _Door:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def responses(self, request: web.Request) -> web.Response:
        body = await _body(request)
        headers = request.headers
        session = _agree(request.match_info.get("session"), headers.get("x-session-id"))
        reply = await self._router.respond(
            body,
            session_id=session,
            group_id=headers.get("x-group-id"),
            group_size=parse_size(headers.get("x-group-size"), "x-group-size"),
            record=parse_flag(headers.get("x-record"), "x-record"),
        )
        return _json(reply)

    async def finish(self, request: web.Request) -> web.Response:
        outcome = await _body(request)
        allowed = {"reward", "turn_rewards", "status", "metadata", "response_id", "error"}
        for name in outcome:
            if name not in allowed:
                raise BadRequest(f"unknown parameter: {name}", name, "unknown_parameter")
        return _json(await self._router.finish(request.match_info["session"], **outcome))

    async def models(self, request: web.Request) -> web.Response:
        names = await self._router.models()
        return _json({"object": "list", "data": [_model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in await self._router.models():
            raise NotFound(f"model {name!r:.100} is not served here", "model", "model_not_found")
        return _json(_model(name))

    async def health(self, request: web.Request) -> web.Response:
        serving = await self._router.serving()
        return _json({"serving_workers": serving}, status=200 if serving else 503)


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollout_workers"}


def _agree(path: str | None, header: str | None) -> str | None:
    if path is not None and header is not None and path != header:
        raise BadRequest(
            f"the URL names session {path!r} and x-session-id {header!r}", "session_id"
        )
    return header if path is None else path


async def _body(request: web.Request) -> Json:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", "body", "invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", "body")
    return body


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _keys(api_key: str | None) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key is not None and request.path not in _OPEN:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                key.encode(errors="surrogateescape"), api_key.encode()
            ):
                raise Unauthorized("send the pool's key as `Authorization: Bearer KEY`")
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    request_id = request.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"
    response: web.StreamResponse
    try:
        response = await handler(request)
    except RolloutError as error:
        response = _json(error.body(), error.status)
    except web.HTTPException as error:
        response = _json(_plain(request, error), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except Exception:
        _log.exception("request %s failed", request_id)
        response = _json(RolloutError(f"internal error; see the log for {request_id}").body(), 500)
    response.headers["x-request-id"] = request_id[:128]
    return response


def _plain(request: web.Request, error: web.HTTPException) -> Json:
    kind = NotFound if error.status == 404 else BadRequest
    text = {
        404: f"no such path: {request.path}; the base URL ends in /v1",
        405: f"{request.method} is not allowed on {request.path}",
        413: "the body is larger than router.http.max_body_bytes",
    }.get(error.status, error.reason)
    return kind(text, None, f"http_{error.status}").body()
