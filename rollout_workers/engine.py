"""HTTP client of SGLang servers: one ``POST /generate`` per turn, every parameter explicit."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from rollout_workers.errors import (
    BadRequest,
    TimedOut,
    WorkerLost,
)
from rollout_workers.generation import Generation, client_error, read_reply
from rollout_workers.responses import SamplingParams
from rollout_workers.routing import WorkerInfo
from rollout_workers.schema import Ids

_encode = msgspec.json.Encoder().encode


def payload(rid: str, prompt: Ids, sampling: SamplingParams, max_new_tokens: int) -> bytes:
    """Body of ``/generate`` with every sampling parameter explicit."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "n": 1,
    }
    body = {
        "rid": rid,
        "input_ids": prompt.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }
    return _encode(body)


def check_ids(ids: Ids, vocab_size: int) -> None:
    """Raise ``BadRequest`` for an id the engine does not know: it would kill the server."""
    if len(ids) == 0:
        raise BadRequest("the prompt is empty", "input")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise BadRequest(f"token ids must lie in [0, {vocab_size})", "input")


def _error_text(raw: bytes) -> str:
    """The message of any of the engine's three error shapes."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw[:200].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


class EngineClient:
    """Owns the HTTP connections to all engines of one router."""

    def __init__(self) -> None:
        # No cap on connections and no client timeout: the caller's deadline is the only one, and
        # admission is decided before the call.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def generate(
        self,
        worker: WorkerInfo,
        rid: str,
        prompt: Ids,
        sampling: SamplingParams,
        max_new_tokens: int,
        deadline_s: float,
    ) -> Generation:
        """Sample one turn on ``worker``. On cancellation or deadline the engine gets an abort.

        Raises:
            BadRequest, BadEngineReply, WorkerLost, TimedOut.
        """
        check_ids(prompt, worker.vocab_size)
        body = payload(rid, prompt, sampling, max_new_tokens)
        started = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                raw = await self._post(worker, body, rid)
        except TimeoutError:
            await asyncio.shield(self.abort(worker, rid))
            raise TimedOut(f"{rid}: no answer within {deadline_s:g} s", None, None, rid) from None
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(worker, rid))
            raise
        seconds = time.monotonic() - started
        return read_reply(raw, rid, len(prompt), worker.vocab_size, sampling.stop, seconds)

    async def abort(self, worker: WorkerInfo, rid: str) -> None:
        """Tell the engine to drop a request; quiet if the engine is gone."""
        if self._http.closed:
            return  # the engine saw its connection close
        headers = {"Authorization": f"Bearer {worker.admin_key}"}
        try:
            async with self._http.post(
                worker.url + "/abort_request",
                json={"rid": rid},
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=5),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError):
            pass  # the request died with its engine

    async def _post(self, worker: WorkerInfo, body: bytes, rid: str) -> bytes:
        headers = {
            "Authorization": f"Bearer {worker.api_key}",
            "Content-Type": "application/json",
        }
        try:
            async with self._http.post(
                worker.url + "/generate", data=body, headers=headers
            ) as reply:
                raw = await reply.read()
        except aiohttp.ClientError as error:
            cause = f"{type(error).__name__}: {error}"
            raise WorkerLost(
                f"{rid}: {worker.name} {cause}", None, None, rid, worker.name
            ) from None
        if reply.status == 200:
            return raw
        message = _error_text(raw)
        if reply.status == 400:
            raise client_error(message)
        raise WorkerLost(
            f"{rid}: {worker.name} answered {reply.status}: {message}",
            None,
            "engine_error",
            rid,
            worker.name,
        )
