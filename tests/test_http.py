"""The front door: real HTTP, by hand and with the `openai` client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from local import HELLO, HI, Json, Rig, config, history, running, sent, text_of, until
from scripted_engine import Reply, ScriptedEngine, logprob_of

from rollout_workers.config import HttpConfig
from rollout_workers.http import serve
from rollout_workers.router import Router

FORMATS = {"Content-Type": "application/json"}


@dataclass
class Door:
    """A rig, its address, and a client to knock with."""

    rig: Rig
    client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        assert self.rig.router.url
        return self.rig.router.url

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    async def call(self, method: str, path: str, **named: Any) -> tuple[int, Json]:
        """Status and JSON of a call; ``path`` counts from the root."""
        async with self.client.request(method, self.root + path, **named) as reply:
            assert reply.headers["x-request-id"]
            assert reply.content_type == "application/json"
            return reply.status, await reply.json()

    async def ask(self, body: Any, **headers: str) -> tuple[int, Json]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.call("POST", "/v1/responses", json=body, headers=named)


@asynccontextmanager
async def opened(
    t0: Path, engine: ScriptedEngine, router: Json | None = None, **http: Any
) -> AsyncIterator[Door]:
    settings = config(t0, {"router": {"http": http, **(router or {})}})
    async with running(settings, engine) as rig, aiohttp.ClientSession() as client:
        yield Door(rig, client)


@pytest.fixture
async def door(t0: Path, engine: ScriptedEngine) -> AsyncIterator[Door]:
    async with opened(t0, engine) as made:
        yield made


@pytest.fixture
async def sdk(door: Door) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=door.url, api_key="any", max_retries=0) as client:
        yield client


# The `openai` client.


async def test_openai_client(door: Door, sdk: openai.AsyncOpenAI) -> None:
    door.rig.engine.script.replies = [Reply(ids=[*HELLO, 2])]
    response = await sdk.responses.create(
        model="policy",
        input="hi",
        temperature=0.5,
        max_output_tokens=9,
        metadata={"a": "b"},
        extra_body={"return_token_ids": True, "top_k": 5},
        extra_headers={"x-session-id": "s"},
    )
    assert response.output_text == "hello"
    assert response.status == "completed"
    assert response.model == "policy"
    assert response.metadata == {"a": "b"}
    extra = response.output[0].model_extra
    assert extra is not None
    assert extra["prompt_token_ids"] == HI
    assert extra["generation_token_ids"] == [*HELLO, 2]
    assert extra["generation_log_probs"] == [logprob_of(token) for token in [*HELLO, 2]]
    [body] = sent(door.rig.engine, "/generate")
    assert body["sampling_params"]["top_k"] == 5
    assert body["sampling_params"]["max_new_tokens"] == 9


async def test_openai_client_goes_on(door: Door, sdk: openai.AsyncOpenAI) -> None:
    """Items of a reply are sent back as the client has them."""
    items: Any = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        response = await sdk.responses.create(
            model="policy", input=items, extra_headers={"x-session-id": "s"}
        )
        items += [*response.output, {"role": "user", "content": "go"}]
    status, told = await door.call("POST", "/v1/sessions/s/finish", json={"reward": 1})
    assert status == 200
    assert told["turns"] == 3
    [row] = await door.rig.rows()
    assert row["reward"] == 1.0
    one, two, three = door.rig.prompts()
    assert three[: len(two)] == two
    assert two[: len(one)] == one


async def test_openai_client_leaves_out_what_it_has_not(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(
        model="policy", input="hi", previous_response_id=None, instructions=None, tools=[]
    )
    assert response.output_text


@pytest.mark.parametrize(
    ("named", "kind", "param", "code"),
    [
        ({"input": ""}, openai.BadRequestError, "input", "invalid_value"),
        ({"input": []}, openai.BadRequestError, "input", "invalid_value"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools", "unsupported_value"),
        ({"extra_body": {"zzz": 1}}, openai.BadRequestError, "zzz", "unknown_parameter"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "model_not_found"),
        ({"input": "x" * 9000}, openai.BadRequestError, "input", "context_length_exceeded"),
    ],
)
async def test_openai_errors(
    sdk: openai.AsyncOpenAI, named: Any, kind: Any, param: str, code: str
) -> None:
    with pytest.raises(kind) as caught:
        await sdk.responses.create(**({"model": "policy", "input": "hi"} | named))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


async def test_openai_errors_of_the_pool(door: Door, sdk: openai.AsyncOpenAI) -> None:
    door.rig.engine.script.replies = [Reply(fault="null"), Reply(fault="drop")]
    for code in ("bad_engine_reply", "worker_lost"):
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.responses.create(model="policy", input="hi")
        assert caught.value.code == code
    await door.rig.router.set_roster([], 0)
    with pytest.raises(openai.InternalServerError) as caught:
        await sdk.responses.create(model="policy", input="hi")
    assert (caught.value.status_code, caught.value.code) == (503, "pool_not_ready")


async def test_openai_models(sdk: openai.AsyncOpenAI, t0: Path) -> None:
    names = [model.id async for model in await sdk.models.list()]
    assert names == [str(t0), "policy"]
    assert (await sdk.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("gpt-9")


async def test_openai_client_of_a_session_url(door: Door) -> None:
    """A base URL of its own for each session, for agents that cannot set headers."""
    url = f"{door.root}/s/mine/v1/"

    def ask() -> str:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            return client.responses.create(model="policy", input="hi").output_text

    assert await asyncio.to_thread(ask)
    assert (await door.rig.router.finish("mine"))["turns"] == 1


# By hand.


async def test_health(door: Door) -> None:
    assert await door.call("GET", "/health") == (200, {"serving_workers": 1})
    await door.rig.router.set_roster([], 0)
    assert await door.call("GET", "/health") == (503, {"serving_workers": 0})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/responses", 404),
        ("POST", "/v1/v1/responses", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/models/a/b/c", 404),
        ("GET", "/v1/responses", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/sessions/s/finish", 405),
    ],
)
async def test_unknown_places(door: Door, method: str, path: str, status: int) -> None:
    got, body = await door.call(method, path)
    assert got == status
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"


async def test_wrong_method_says_which_is_right(door: Door) -> None:
    async with door.client.get(door.url + "/responses") as reply:
        assert reply.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"hello",
        b'{"input": "\xff"}',
        b'{"input": "\\ud800"}',
        b'{"input": NaN}',
        b'{"input": 1e999}',
        b"[" * 100_000,
        b'{"input": "hi", "text": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b"[]",
        b'"hi"',
        b"null",
        b"\x00",
    ],
    ids=range(13),
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/sessions/s/finish"])
async def test_bodies_that_are_no_json(door: Door, path: str, data: bytes) -> None:
    await door.rig.router.open_session("s")
    status, body = await door.call("POST", path, data=data, headers=FORMATS)
    assert status == 400
    assert body["error"]["param"] == "body"
    assert not door.rig.engine.recorded


@pytest.mark.parametrize(
    "text",
    [
        '{"input": "hi", "temperature": 1%s}',
        '{"input": "hi", "max_output_tokens": 1%s}',
        '{"input": [{"role": "user", "content": 1%s}]}',
        '{"input": "hi", "1%s": 1}',
    ],
)
async def test_huge_numbers(door: Door, text: str) -> None:
    data = (text % ("0" * 5000)).encode()
    status, body = await door.call("POST", "/v1/responses", data=data, headers=FORMATS)
    assert status == 400
    assert body["error"]["param"]


async def test_large_bodies(t0: Path, engine: ScriptedEngine) -> None:
    async with opened(t0, engine, max_body_bytes=100_000) as door:
        status, body = await door.ask({"input": "x" * 100_001})
        assert status == 413
        assert "max_body_bytes" in body["error"]["message"]
        status, _ = await door.ask({"input": "x", "instructions": "a" * 4000})
        assert status == 200


async def test_keys(t0: Path, engine: ScriptedEngine) -> None:
    async with opened(t0, engine, api_key="sécret") as door:
        for header in (None, "", "sécret", "Bearer", "Bearer wrong", "Basic sécret", "Bearer s"):
            headers = {} if header is None else {"Authorization": header}
            for method, path in (("POST", "/v1/responses"), ("GET", "/v1/models"), ("GET", "/x")):
                status, body = await door.call(method, path, headers=headers)
                assert status == 401
                assert body["error"]["code"] == "invalid_api_key"
                assert "sécret" not in str(body)
        assert (await door.call("GET", "/health"))[0] == 200
        for scheme in ("Bearer", "bearer"):
            assert (await door.ask({"input": "hi"}, Authorization=f"{scheme} sécret"))[0] == 200
        async with openai.AsyncOpenAI(base_url=door.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="policy", input="hi")


async def raw(door: Door, *lines: bytes, body: bytes = b"") -> bytes:
    """One exchange with bytes that no client library would send."""
    address = door.root.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(address[0], int(address[1]))
    head = [*lines, b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body), b"", body]
    writer.write(b"\r\n".join(head))
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"Authorization: Bearer \xff\xfe", b"401"),
        (b"x-request-id: \xff\xfe", b"401"),
        (b"x-session-id: \xff", b"401"),
    ],
)
async def test_headers_that_are_no_text(
    t0: Path, engine: ScriptedEngine, line: bytes, status: bytes
) -> None:
    async with opened(t0, engine, api_key="secret") as door:
        answer = await raw(door, b"POST /v1/responses HTTP/1.1", line, body=b"{}")
        assert answer.split(b" ")[1] == status
        assert answer.endswith(b"}")


async def test_session_header_that_is_no_text(door: Door) -> None:
    answer = await raw(
        door, b"POST /v1/responses HTTP/1.1", b"x-session-id: \xff", body=b'{"input": "hi"}'
    )
    assert answer.split(b" ")[1] == b"400"
    assert b'"param":"session_id"' in answer


async def test_request_id_comes_back(door: Door) -> None:
    async with door.client.get(door.root + "/health", headers={"x-request-id": "mine"}) as reply:
        assert reply.headers["x-request-id"] == "mine"
    made = set()
    for _ in range(2):
        async with door.client.get(door.root + "/health") as reply:
            made.add(reply.headers["x-request-id"])
    assert len(made) == 2


# Sessions.


async def test_ways_to_name_a_session(door: Door) -> None:
    for number, (path, headers, metadata) in enumerate(
        [
            ("/s/name/v1/responses", {}, None),
            ("/v1/responses", {"x-session-id": "name"}, None),
            ("/v1/responses", {}, {"session_id": "name"}),
            ("/s/name/v1/responses", {"x-session-id": "name"}, {"session_id": "name"}),
        ]
    ):
        body = {"input": f"q{number}", "metadata": metadata}
        status, reply = await door.call("POST", path, json=body, headers=headers)
        assert status == 200
        assert reply["rollout"]["session_id"] == "name"
    status, told = await door.call("POST", "/v1/sessions/name/finish", json={})
    assert (status, told["turns"]) == (200, 4)
    assert (await door.call("GET", "/s/name/v1/models"))[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "metadata", "param"),
    [
        ("/s/a/v1/responses", {"x-session-id": "b"}, None, "session_id"),
        ("/s/a/v1/responses", {}, {"session_id": "b"}, "metadata.session_id"),
        ("/v1/responses", {"x-session-id": "a"}, {"session_id": "b"}, "metadata.session_id"),
        ("/v1/responses", {"x-session-id": "a b"}, None, "session_id"),
        ("/v1/responses", {"x-session-id": ""}, None, "session_id"),
        ("/v1/responses", {"x-session-id": "x" * 129}, None, "session_id"),
        ("/s/a%0A/v1/responses", {}, None, "session_id"),
        ("/s/a%20b/v1/responses", {}, None, "session_id"),
        ("/v1/responses", {"x-group-size": "4"}, None, "group_id"),
        ("/v1/responses", {"x-group-id": "g", "x-group-size": "four"}, None, "x-group-size"),
        ("/v1/responses", {"x-group-id": "g", "x-group-size": "0"}, None, "group_size"),
        ("/v1/responses", {"x-group-id": "g", "x-group-size": "9" * 30}, None, "group_size"),
        ("/v1/responses", {"x-group-id": "a b"}, None, "group_id"),
        ("/v1/responses", {"x-record": "no"}, None, "x-record"),
    ],
)
async def test_wrong_names(door: Door, path: str, headers: Any, metadata: Any, param: str) -> None:
    body = {"input": "hi", "metadata": metadata}
    status, reply = await door.call("POST", path, json=body, headers=headers)
    assert status == 400
    assert reply["error"]["param"] == param
    assert not door.rig.engine.recorded
    assert (await door.rig.router.status())["sessions"] == 0


async def test_group_and_record_headers(door: Door) -> None:
    group = {"x_group_id": "g", "x_group_size": "2"}
    for number in range(2):
        assert (await door.ask({"input": "hi"}, x_session_id=f"g.{number}", **group))[0] == 200
        await door.call("POST", f"/v1/sessions/g.{number}/finish", json={"reward": number})
    await door.ask({"input": "hi"}, x_session_id="eval", x_record="false")
    await door.call("POST", "/v1/sessions/eval/finish", json={"reward": 1})
    batch = await door.rig.buffer.take(groups=1)
    assert batch.table["group_size"].to_pylist() == [2, 2]
    assert (await door.rig.buffer.status())["waiting"] == 0
    status, body = await door.ask(
        {"input": "hi"}, x_session_id="g.2", x_group_id="g", x_group_size="3"
    )
    assert (status, body["error"]["param"]) == (409, "group_size")
    assert (await door.ask({"input": "hi"}, x_session_id="g.2", x_group_id="g"))[0] == 200
    status, body = await door.ask({"input": "hi"}, x_session_id="g.2", x_group_id="h")
    assert (status, body["error"]["param"]) == (409, "group_id")


async def test_finish(door: Door) -> None:
    await door.ask({"input": "hi"}, x_session_id="s")
    path = "/v1/sessions/s/finish"
    wrong: list[tuple[Json, str]] = [
        ({"bogus": 1}, "bogus"),
        ({"session_id": "t"}, "session_id"),
        ({"reward": "1"}, "reward"),
        ({"reward": int("9" * 400)}, "reward"),
        ({"status": "great"}, "status"),
        ({"turn_rewards": [1, 2]}, "turn_rewards"),
        ({"metadata": [1]}, "metadata"),
        ({"response_id": "resp_1"}, "response_id"),
    ]
    for body, param in wrong:
        status, reply = await door.call("POST", path, json=body)
        assert (status, reply["error"]["param"]) == (400, param)
    body = {"reward": 1, "turn_rewards": [0.5], "metadata": {"k": "🙂"}, "error": None}
    status, told = await door.call("POST", path, json=body)
    assert status == 200
    assert await door.call("POST", path, json=body) == (200, told)
    status, reply = await door.call("POST", path, json={})
    assert (status, reply["error"]["code"]) == (409, "conflict")
    status, reply = await door.ask({"input": "hi"}, x_session_id="s")
    assert status == 409
    status, reply = await door.call("POST", "/v1/sessions/nope/finish", json={})
    assert (status, reply["error"]["param"]) == (404, "session_id")
    [row] = await door.rig.rows()
    assert (row["reward"], row["turn_rewards"]) == (1.0, [0.5])
    assert json.loads(row["metadata"]) == {"k": "🙂"}


async def test_token_fields_by_the_pools_default(t0: Path, engine: ScriptedEngine) -> None:
    async with opened(t0, engine, {"return_token_ids": True}) as door:
        _, reply = await door.ask({"input": "hi"})
        assert reply["output"][0]["prompt_token_ids"] == HI
        _, reply = await door.ask({"input": "hi", "return_token_ids": False})
        assert "prompt_token_ids" not in reply["output"][0]


# Callers that go away.


async def test_hang_up_aborts_the_generation(door: Door) -> None:
    engine = door.rig.engine
    engine.script.replies = [Reply(fault="hang")]
    call = asyncio.create_task(door.ask({"input": "hi"}, x_session_id="s"))
    await until(lambda: len(engine.running) == 1)
    [rid] = engine.running
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not engine.running)
    assert sent(engine, "/abort_request") == [{"rid": rid}]
    await until(door.rig.idle)
    status, _ = await door.ask({"input": "hi"}, x_session_id="s")
    assert status == 200
    assert sent(engine, "/generate")[-1]["input_ids"] == HI
    await door.call("POST", "/v1/sessions/s/finish", json={})
    [row] = await door.rig.rows()
    assert len(row["turns"]) == 1


async def test_client_timeout_aborts_the_generation(door: Door) -> None:
    engine = door.rig.engine
    engine.script.replies = [Reply(fault="hang")]
    async with openai.AsyncOpenAI(
        base_url=door.url, api_key="any", max_retries=0, timeout=0.2
    ) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.responses.create(model="policy", input="hi")
    await until(lambda: len(sent(engine, "/abort_request")) == 1)
    await until(door.rig.idle)
    assert (await door.rig.router.status())["sessions"] == 0


async def test_stopping_does_not_wait_for_generations(
    t0: Path, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script.replies = [Reply(fault="hang")]
    async with opened(t0, engine) as door:
        call = asyncio.create_task(door.ask({"input": "hi"}))
        await until(lambda: len(engine.running) == 1)
        async with asyncio.timeout(5):
            await door.rig.router.stop()
        with pytest.raises(aiohttp.ClientError):
            await call
    assert not caplog.records


async def test_many_at_once(door: Door) -> None:
    door.rig.engine.script.delay_s = 0.2
    calls = [door.ask({"input": f"q{i}"}, x_session_id=f"s{i}") for i in range(64)]
    running_ = asyncio.gather(*calls)
    await until(lambda: len(door.rig.engine.running) == 64)
    assert {status for status, _ in await running_} == {200}
    assert await door.rig.idle()


# Where it listens.


async def test_taken_port(t0: Path) -> None:
    router = Router(0, config(t0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await serve(router, HttpConfig(port=port))


async def test_ipv6(t0: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    runner, url = await serve(Router(0, config(t0)), HttpConfig(host="::1"))
    try:
        async with aiohttp.ClientSession() as client, client.get(url + "/models") as reply:
            assert reply.status == 200
    finally:
        await runner.cleanup()


async def test_replies_are_utf8(door: Door) -> None:
    status, reply = await door.ask({"input": history("hi 🙂"), "metadata": {"k": "🙂"}})
    assert (status, reply["metadata"]) == (200, {"k": "🙂"})
    assert isinstance(text_of(reply), str)
