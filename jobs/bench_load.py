"""Clients for benchmarks: a process of its own that sends what it is told, one order a line.

A benchmark starts it with ``Load`` and gives it an ``Order`` at a time; what the client itself
costs is then in nobody else's account.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

Json = dict[str, Any]
Turn = Callable[[Json, str], Awaitable[Json]]

_WORDS = "what would the quick brown fox say of a lazy dog that counts nine apples and one pear "


class Order(msgspec.Struct, kw_only=True):
    """``sessions`` conversations of ``turns`` turns each, ``lanes`` of them at once."""

    kind: Literal["direct", "generate", "responses", "handle"]
    """aiohttp and arrays, or raw sockets, to ``/generate``; sessions over HTTP, or the handle."""
    target: str
    """The engine's or the front door's address, or the pool's name."""
    names: str = ""
    """What the ids of the sessions begin with."""
    sessions: int
    turns: int = 1
    lanes: int
    tokens: int
    model: str = ""
    key: str = ""
    token_ids: bool = False
    finish: bool = True


class Result(msgspec.Struct, kw_only=True):
    """What an order came to."""

    turns: int
    tokens: int
    seconds: float
    cpu_s: float
    latencies_s: list[float]


class Load:
    """Owns a client process; a context manager."""

    def __enter__(self) -> Load:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, order: Order) -> Result:
        """Carry out an order and return what it came to.

        Raises:
            RuntimeError: the client failed; its traceback is on stderr.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client failed at {order}")
        return msgspec.json.decode(line, type=Result)


def question(session: int, turn: int) -> str:
    """About 100 tokens of any tokenizer, another for each turn of each session."""
    return f"{session}.{turn} " + _WORDS * 3


class _Raw:
    """One keep-alive HTTP connection, as thin as can be."""

    def __init__(self, base: str, key: str) -> None:
        host, _, path = base.removeprefix("http://").partition("/")
        self._host, _, self._port = host.partition(":")
        self._prefix = f"/{path}" if path else ""
        self._head = f"Host: {host}\r\nAuthorization: Bearer {key}\r\n"
        self._head += "Content-Type: application/json\r\n"

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(
            self._host, int(self._port), limit=1 << 24
        )

    async def post(self, path: str, body: bytes, session: str = "") -> bytes:
        own = f"x-session-id: {session}\r\n" if session else ""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{own}"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r")[0])
        content = await self._reader.readexactly(length)
        if b" 200 " not in answer[:16]:
            raise RuntimeError(f"{path}: {answer[:16]!r} {content[:500]!r}")
        return content

    def close(self) -> None:
        self._writer.close()


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, str | None]]


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Part(msgspec.Struct):
    text: str


class _Item(msgspec.Struct):
    content: list[_Part]


class _Answer(msgspec.Struct):
    output: list[_Item]


_encode = msgspec.json.Encoder().encode
_decode_generated = msgspec.json.Decoder(_Generated).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def _arrays(raw: bytes) -> tuple[Any, Any]:
    reply = _decode_generated(raw)
    triples = reply.meta_info.output_token_logprobs
    ids = np.fromiter(reply.output_ids, np.int32, len(reply.output_ids))
    return ids, np.fromiter((t[0] for t in triples), np.float32, len(triples))


def _bodies(order: Order) -> list[bytes]:
    """What ``/generate`` gets: each session's first question, rendered."""
    from rollout_workers import models
    from rollout_workers.ledger import Message
    from rollout_workers.template import ChatTemplate

    template = ChatTemplate(models.resolve(order.model), without_torch=True)
    sampling = {"max_new_tokens": order.tokens, "temperature": 1.0, "ignore_eos": True}
    asked = [Message(role="user", content=question(i, 0)) for i in range(order.sessions)]
    prompts = [template.render([message]).tolist() for message in asked]
    rest = {"sampling_params": sampling, "return_logprob": True}
    return [_encode({"input_ids": prompt, **rest}) for prompt in prompts]


async def _direct(order: Order, bodies: list[bytes]) -> list[float]:
    headers = {"Authorization": f"Bearer {order.key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:

        async def one(body: bytes) -> None:
            async with http.post(order.target + "/generate", data=body) as reply:
                reply.raise_for_status()
                ids, logprobs = _arrays(await reply.read())
            assert len(ids) == len(logprobs) == order.tokens

        return await _lanes(order, lambda number, _: one(bodies[number]))


async def _raw(order: Order, bodies: list[bytes]) -> list[float]:
    connections = [_Raw(order.target, order.key) for _ in range(order.lanes)]
    await asyncio.gather(*(connection.open() for connection in connections))

    async def one(number: int, lane: int) -> None:
        await connections[lane].post("/generate", bodies[number])

    async def talk(number: int, lane: int) -> list[float]:
        async def turn(body: Json, name: str) -> Json:
            raw = await connections[lane].post("/responses", _encode(body), name)
            return {"role": "assistant", "content": _decode_answer(raw).output[0].content[0].text}

        async def finish(name: str) -> None:
            await connections[lane].post(f"/sessions/{name}/finish", b'{"reward":1.0}')

        return await _session(order, number, turn, finish)

    try:
        return await _lanes(order, one if order.kind == "generate" else talk)
    finally:
        for connection in connections:
            connection.close()


async def _handle(order: Order, pool: Any) -> list[float]:
    async def turn(body: Json, name: str) -> Json:
        reply = await pool.respond(body, name)
        return {"role": "assistant", "content": reply["output"][0]["content"][0]["text"]}

    async def finish(name: str) -> None:
        await pool.finish(name, 1.0)

    return await _lanes(order, lambda number, _: _session(order, number, turn, finish))


async def _session(
    order: Order, number: int, turn: Turn, finish: Callable[[str], Awaitable[None]]
) -> list[float]:
    name, history, latencies = f"{order.names}-{number}", [], []
    for i in range(order.turns):
        history.append({"role": "user", "content": question(number, i)})
        body = {"input": history, "max_output_tokens": order.tokens, "ignore_eos": True}
        if order.token_ids:
            body["return_token_ids"] = True
        started = time.perf_counter()
        answer = await turn(body, name)
        latencies.append(time.perf_counter() - started)
        history.append(answer)
    if order.finish:
        await finish(name)
    return latencies


async def _lanes(
    order: Order, work: Callable[[int, int], Awaitable[list[float] | None]]
) -> list[float]:
    """Work through all sessions, ``lanes`` at a time; returns the latencies of all turns."""
    numbers: Iterator[int] = itertools.count()
    latencies: list[float] = []

    async def lane(index: int) -> None:
        while (number := next(numbers)) < order.sessions:
            started = time.perf_counter()
            own = await work(number, index)
            latencies.extend([time.perf_counter() - started] if own is None else own)

    await asyncio.gather(*(lane(index) for index in range(order.lanes)))
    return latencies


async def _carry_out(order: Order, prepared: Any) -> Result:
    do = {"direct": _direct, "generate": _raw, "responses": _raw, "handle": _handle}[order.kind]
    cpu, started = time.process_time(), time.perf_counter()
    latencies = await do(order, prepared)
    turns = order.sessions * order.turns
    return Result(
        turns=turns,
        tokens=turns * order.tokens,
        seconds=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu,
        latencies_s=latencies,
    )


def _prepare(order: Order, kept: dict[Any, Any]) -> Any:
    """What an order needs before its clock starts; kept, as orders repeat."""
    if order.kind == "responses":
        return None
    key = (order.target,) if order.kind == "handle" else (order.tokens, order.sessions)
    if key not in kept:
        if order.kind == "handle":
            from rollout_workers import RolloutPool

            kept[key] = RolloutPool.connect(order.target)
        else:
            kept[key] = _bodies(order)
    return kept[key]


def _main() -> None:
    kept: dict[Any, Any] = {}
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            result = runner.run(_carry_out(order, _prepare(order, kept)))
            print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    _main()
