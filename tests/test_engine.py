"""The engine client: a reply is whole or an error, and no request is left behind on an engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local import HELLO, HI, VOCAB_SIZE, sent, until, worker
from scripted_engine import Reply, ScriptedEngine, logprob_of, sample

from rollout_workers.engine import EngineClient, check_ids, payload
from rollout_workers.errors import (
    BadEngineReply,
    BadRequest,
    ContextOverflow,
    RolloutError,
    TimedOut,
    WorkerLost,
)
from rollout_workers.generation import Generation, read_reply
from rollout_workers.responses import SamplingParams
from rollout_workers.schema import Span

SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    stop=("END",),
    stop_token_ids=(5,),
    ignore_eos=True,
)
PROMPT = np.array(HI, np.int32)


def raw(
    ids: Any = (10, 20, 30), logprobs: Any = ..., named: Any = None, **meta: Any
) -> dict[str, Any]:
    """A reply as SGLang makes it; ``...`` leaves a field out."""
    ids = list(ids)
    named = ids if named is None else named
    if logprobs is ...:
        logprobs = [-0.5] * len(ids)
    triples = None
    if logprobs is not None:
        triples = [[p, t, None] for p, t in zip(logprobs, named, strict=False)]
    made = {
        "id": "rid",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 4,
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": triples,
        "e2e_latency": 0.1,
    } | meta
    made = {name: value for name, value in made.items() if value is not ...}
    return {"text": "", "output_ids": ids, "meta_info": made}


def read(body: Any) -> Generation:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return read_reply(data, "resp_1", 4, 100, SAMPLING.stop, 1.5)


def test_good_reply() -> None:
    made = read(raw(logprobs=[-0.5, -0.25, 0.0]))
    assert made.ids.tolist() == [10, 20, 30]
    assert made.ids.dtype == np.int32
    assert made.logprobs.tolist() == [-0.5, -0.25, 0.0]
    assert made.logprobs.dtype == np.float32
    assert made.spans == (Span(start=0, end=3, version=0),)
    assert (made.finish_reason, made.matched, made.cached_tokens) == ("stop", 2, 2)
    assert made.seconds == 1.5


def test_empty_generation() -> None:
    made = read(raw(ids=(), weight_versions=[]))
    assert len(made.ids) == len(made.logprobs) == len(made.spans) == 0
    assert read(raw(ids=(), weight_versions=[{"version": "3", "start": 0, "end": 0}])).spans == ()


def test_length_stop_and_stop_string() -> None:
    assert read(raw(finish_reason={"type": "length", "length": 3})).finish_reason == "length"
    assert read(raw(finish_reason={"type": "stop", "matched": "END"})).matched == "END"


def test_several_versions() -> None:
    versions = [
        {"version": "4", "start": 0, "end": 1},
        {"version": "5", "start": 1, "end": 1},
        {"version": "6", "start": 1, "end": 3},
    ]
    assert read(raw(weight_versions=versions)).spans == (
        Span(start=0, end=1, version=4),
        Span(start=1, end=3, version=6),
    )


def span(start: int, end: int, version: Any = "0") -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


BROKEN: dict[str, tuple[Any, str]] = {
    "4 logprobs for 5 ids": (raw((1, 2, 3, 4, 5), logprobs=[-1.0] * 4), "5 ids .* 4 logprobs"),
    "6 logprobs for 5 ids": (
        raw((1, 2, 3, 4, 5), logprobs=[-1.0] * 6, named=range(1, 7)),
        "5 ids .* 6 logprobs",
    ),
    "no logprobs": (raw((1, 2, 3, 4, 5), logprobs=None), "5 ids .* no logprobs"),
    "logprobs left out": (raw(output_token_logprobs=...), "3 ids .* no logprobs"),
    "other id": (
        raw((1, 2, 3, 4, 5), named=[1, 2, 3, 9, 5]),
        "logprob 3 names id 9, output has 4",
    ),
    "counts 6": (raw((1, 2, 3, 4, 5), completion_tokens=6), "counts 6 tokens, sent 5"),
    "no count": (raw(completion_tokens=...), "counts None tokens, sent 3"),
    "other prompt": (raw(prompt_tokens=5), "saw 5 prompt ids, not 4"),
    "no prompt count": (raw(prompt_tokens=...), "saw None prompt ids"),
    "id too large": (raw((1, 100)), "vocabulary of 100"),
    "id negative": (raw((1, -1)), "vocabulary of 100"),
    "id huge": (raw((1, 2**63)), "resp_1"),
    "null logprob": (raw(logprobs=[-1.0, None, -1.0]), "logprob 1 is nan"),
    "infinite logprob": (raw(logprobs=[-1.0, -1e300, -1.0]), "logprob 1 is -inf"),
    "least bfloat16": (raw(logprobs=[-1.0, -1.0, -3.3895e38]), "logprob 2 is -3.38"),
    "least float32": (
        raw(logprobs=[-1.0, float(np.finfo(np.float32).min), -1.0]),
        "logprob 1 is -3.40",
    ),
    "NaN": (raw(finish_reason={"type": "stop", "matched": "NaN happened"}), "'NaN happened'"),
    "a piece of a stop string": (raw(finish_reason={"type": "stop", "matched": "EN"}), "'EN'"),
    "positive logprob": (raw(logprobs=[-1.0, 0.5, -1.0]), "logprob 1 is 0.5"),
    "no versions": (raw(weight_versions=...), "do not tile 3 tokens"),
    "versions too short": (raw(weight_versions=[span(0, 2)]), "do not tile 3 tokens"),
    "versions too long": (raw(weight_versions=[span(0, 4)]), "do not tile 3 tokens"),
    "versions late": (raw(weight_versions=[span(1, 3)]), "do not tile 3 tokens"),
    "gap in versions": (raw(weight_versions=[span(0, 1), span(2, 3)]), "do not tile 3 tokens"),
    "overlap in versions": (raw(weight_versions=[span(0, 2), span(1, 3)]), "do not tile"),
    "named version": (raw(weight_versions=[span(0, 3, "default")]), "not a number"),
    "huge version": (raw(weight_versions=[span(0, 3, "9" * 30)]), "not a number"),
    "not JSON": (b'{"text": "cut', "not what /generate answers"),
    "empty": (b"", "not what /generate answers"),
    "not UTF-8": (
        b'{"output_ids": [], "meta_info": {"finish_reason": {"type": "\xff"}}}',
        "not what /generate",
    ),
    "deep": (b"[" * 100_000, "not what /generate answers"),
    "an error": ({"error": {"message": "no"}}, "not what /generate answers"),
    "a list": ([raw()], "not what /generate answers"),
    "ids as text": (raw(["1"]), "not what /generate answers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_reply_is_never_repaired(name: str) -> None:
    body, said = BROKEN[name]
    with pytest.raises(BadEngineReply, match=said) as caught:
        read(body)
    assert "resp_1" in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        ({"type": "abort", "message": "Aborted", "status_code": None}, WorkerLost),
        ({"type": "abort", "message": "scheduler died", "status_code": 500}, WorkerLost),
        ({"type": "abort", "message": "bad grammar", "status_code": 400}, BadRequest),
        (
            {
                "type": "abort",
                "message": "longer than the model's context length",
                "status_code": 400,
            },
            ContextOverflow,
        ),
        ({"type": "abort"}, WorkerLost),
        ({"type": "something new"}, WorkerLost),
        (None, WorkerLost),
        (..., WorkerLost),
    ],
)
def test_aborts(finish: Any, kind: type[RolloutError]) -> None:
    """An abort may bring ids that were never sampled: none of them counts."""
    with pytest.raises(kind) as caught:
        read(raw(finish_reason=finish))
    assert type(caught.value) is kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(
    where=st.sampled_from(["output_ids", *raw()["meta_info"]]),
    value=JSON,
    deeper=st.booleans(),
)
def test_whatever_replaces_a_field_is_noticed(where: str, value: Any, deeper: bool) -> None:
    body = raw()
    if where == "output_ids":
        body[where] = value
    elif deeper and isinstance(body["meta_info"][where], list):
        body["meta_info"][where][0] = value
    else:
        body["meta_info"][where] = value
    try:
        data = msgspec.json.encode(body)
    except (OverflowError, ValueError):
        return  # not JSON that any engine could send
    try:
        made = read(data)
    except RolloutError:
        return
    assert made.ids.tolist() == [10, 20, 30]
    assert len(made.logprobs) == 3


# What is sent.


def test_every_sampling_parameter_is_explicit() -> None:
    body = msgspec.json.decode(payload("resp_1", PROMPT, SAMPLING, 9))
    assert body == {
        "rid": "resp_1",
        "input_ids": HI,
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 9,
            "min_new_tokens": 0,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
            "stop": ["END"],
            "stop_token_ids": [5],
            "ignore_eos": True,
            "skip_special_tokens": True,
            "no_stop_trim": False,
            "n": 1,
        },
    }


@pytest.mark.parametrize("ids", [[], [-1], [100], [1, 2, 2**31 - 1]])
def test_ids_that_would_kill_an_engine(ids: list[int]) -> None:
    with pytest.raises(BadRequest) as caught:
        check_ids(np.array(ids, np.int32), 100)
    assert caught.value.param == "input"
    check_ids(np.array([0, 99], np.int32), 100)


# Over HTTP.


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient()
    yield made
    await made.close()


def ask(
    client: EngineClient, engine: ScriptedEngine | str, rid: str = "r1", **named: Any
) -> asyncio.Task[Generation]:
    prompt = named.pop("prompt", PROMPT)
    deadline_s = named.pop("deadline_s", 30.0)
    new_tokens = named.pop("new_tokens", 4)
    target = worker(engine, **named)
    return asyncio.create_task(
        client.generate(target, rid, prompt, SAMPLING, new_tokens, deadline_s)
    )


async def test_round_trip(client: EngineClient, engine: ScriptedEngine) -> None:
    made = await ask(client, engine)
    wanted = sample(HI, 4, VOCAB_SIZE, stop=5)
    assert made.ids.tolist() == wanted.ids
    assert made.logprobs.tolist() == wanted.logprobs
    assert made.matched == 5
    [body] = sent(engine, "/generate")
    assert msgspec.json.encode(body) == payload("r1", PROMPT, SAMPLING, 4)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (Reply(fault="status", status=400), BadRequest, "scripted"),
        (Reply(fault="status", status=400, body="no JSON"), BadRequest, "no JSON"),
        (Reply(fault="status", status=400, body='{"message": "why"}'), BadRequest, "why"),
        (Reply(fault="status", status=400, body='["odd"]'), BadRequest, "odd"),
        (
            Reply(fault="status", status=400, body='{"error": {"message": "the context length"}}'),
            ContextOverflow,
            "context length",
        ),
        (Reply(fault="status", status=401), WorkerLost, "w0 answered 401"),
        (Reply(fault="status", status=404), WorkerLost, "w0 answered 404"),
        (Reply(fault="status", status=500), WorkerLost, "w0 answered 500: scripted"),
        (Reply(fault="status", status=503, body="busy"), WorkerLost, "w0 answered 503: busy"),
        (Reply(fault="garbage"), BadEngineReply, "r1: reply is not what"),
        (Reply(fault="drop"), WorkerLost, "w0 ServerDisconnected"),
        (Reply(fault="abort", status=500), WorkerLost, "scripted"),
        (Reply(fault="abort", status=400), BadRequest, "scripted"),
        (Reply(fault="wrong_lengths"), BadEngineReply, "4 ids came with 3 logprobs"),
        (Reply(fault="out_of_vocab"), BadEngineReply, "vocabulary"),
        (Reply(fault="null"), BadEngineReply, "logprob 0 is nan"),
        (Reply(ids=HELLO, logprobs=[1.0, -1.0, -1.0]), BadEngineReply, "logprob 0 is 1.0"),
        (Reply(meta={"prompt_tokens": 1}), BadEngineReply, "saw 1 prompt ids, not 21"),
    ],
)
async def test_faults(
    client: EngineClient,
    engine: ScriptedEngine,
    reply: Reply,
    kind: type[RolloutError],
    said: str,
) -> None:
    engine.script.replies = [reply]
    with pytest.raises(kind, match=said) as caught:
        await ask(client, engine)
    assert type(caught.value) is kind
    assert (await ask(client, engine, "r2")).ids.tolist()  # the connection is fine afterwards


async def test_wrong_key(client: EngineClient, engine: ScriptedEngine) -> None:
    with pytest.raises(WorkerLost, match="answered 401: Unauthorized"):
        await ask(client, engine, api_key="wrong")


async def test_prompt_too_long_for_the_engine(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.context_length = 20
    with pytest.raises(ContextOverflow, match="context length") as caught:
        await ask(client, engine)
    assert caught.value.param == "input"


async def test_unknown_ids_are_never_sent(client: EngineClient, engine: ScriptedEngine) -> None:
    for ids in ([VOCAB_SIZE], [-1], []):
        with pytest.raises(BadRequest):
            await ask(client, engine, prompt=np.array(ids, np.int32))
    assert not engine.recorded


async def test_deadline(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.script.replies = [Reply(fault="hang")]
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"no answer within 0\.2 s") as caught:
        await ask(client, engine, deadline_s=0.2)
    assert time.monotonic() - started < 5
    assert caught.value.retryable
    assert caught.value.request_id == "r1"
    assert sent(engine, "/abort_request") == [{"rid": "r1"}]
    await until(lambda: not engine.running)


async def test_cancellation(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.script.replies = [Reply(fault="hang")]
    call = ask(client, engine)
    await until(lambda: "r1" in engine.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert sent(engine, "/abort_request") == [{"rid": "r1"}]
    await until(lambda: not engine.running)


async def test_abort_of_one_leaves_the_others(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.script.delay_s = 0.3
    calls = [ask(client, engine, f"r{i}") for i in range(3)]
    await until(lambda: len(engine.running) == 3)
    calls[1].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert isinstance(results[0], Generation)
    assert isinstance(results[2], Generation)


async def test_closed_port(client: EngineClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="w0 ClientConnectorError") as caught:
        await ask(client, f"http://127.0.0.1:{port}")
    assert time.monotonic() - started < 10
    assert caught.value.worker == "w0"
    assert caught.value.retryable


async def test_port_that_accepts_and_never_answers(client: EngineClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = "http://{}:{}".format(*listener.getsockname())
        call = ask(client, url, deadline_s=0.2)
        started = time.monotonic()
        with pytest.raises(TimedOut):
            await call
        assert time.monotonic() - started < 10


async def test_512_at_once(client: EngineClient, engine: ScriptedEngine) -> None:
    """No limit of the client's own: all of them are on the engine at the same time."""
    engine.script.delay_s = 60.0
    calls = [ask(client, engine, f"r{i}") for i in range(512)]
    await until(lambda: len(engine.running) == 512, within_s=30)
    for aborted in engine.running.values():
        aborted.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {WorkerLost}
    assert len(sent(engine, "/generate")) == 512


async def test_logprobs_keep_float32(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.script.replies = [Reply(ids=HELLO)]
    made = await ask(client, engine)
    assert made.logprobs.tolist() == [logprob_of(token) for token in HELLO]
