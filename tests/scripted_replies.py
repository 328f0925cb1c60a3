"""What the scripted engine answers: replies in SGLang's shape, computed from the prompt alone.

``sample`` says what a prompt gets, so that tests can compute it; ``Script`` and ``Reply`` say where
the engine departs from that. Pure.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

Json = dict[str, Any]
Fault = Literal[
    "status",  # an HTTP error
    "garbage",  # 200, not JSON
    "drop",  # the connection is cut
    "hang",  # no answer until it is aborted
    "abort",  # an abort of the engine's own, with a status code
    "wrong_lengths",  # one logprob too few
    "out_of_vocab",  # an id the model does not have
    "null",  # logprobs are null
    "exit",  # the whole engine dies
]
ABORTED: Json = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    """What one ``/generate`` gets; unset fields are as without a script."""

    ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: Json | None = None
    fault: Fault | None = None
    status: int = 500
    body: str | None = None
    """Text of fault ``status`` or ``garbage``."""
    after: int = 0
    """Tokens that a stream has delivered when the fault comes; 0 is before the first byte."""
    delay_s: float | None = None
    meta: Json = {}
    """Laid over ``meta_info``."""


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """How the engine behaves; the default is an instant engine that fills ``max_new_tokens``."""

    tokens: int | None = None
    """Length of a reply, which then ends with a stop token; None fills ``max_new_tokens``."""
    vocab_size: int = 1024
    eos_id: int = 2
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    replies: list[Reply] = []
    """Used up one by one, in the order in which requests come."""
    record_file: str | None = None
    """Every request's path and body, as JSON lines."""
    start_log: str | None = None
    start_delay_s: float = 0.0
    start_exit: int | None = None
    """End with this code, after log and delay, instead of serving."""
    children: int = 0
    """Spawned processes that only wait, as SGLang has."""
    ignore_signals: bool = False
    health_delay_s: float = 0.0


class Sample(NamedTuple):
    """Generated tokens."""

    ids: list[int]
    logprobs: list[float]


class Generation(NamedTuple):
    """What a request gets; logprobs are ``logprob_of`` each id where None."""

    ids: list[int]
    logprobs: list[float] | None
    reason: Json


def logprob_of(token_id: int) -> float:
    """The logprob the engine gives this id; exact in float32."""
    return -(token_id * 37 % 1000 + 1) / 256


def sample(
    prompt: Sequence[int], count: int, vocab_size: int = 1024, stop: int | None = None
) -> Sample:
    """What a prompt gets: ``count`` ids, the last of them ``stop`` if given."""
    ids = _ids(_ring(vocab_size), prompt, count, stop)
    return Sample(ids, [logprob_of(token) for token in ids])


def _ring(vocab_size: int) -> list[int]:
    low, high = 32, vocab_size - 64  # clear of special ids at either end
    return [low + position * 389 % (high - low) for position in range(high - low)]


def _ids(ring: list[int], prompt: Sequence[int], count: int, stop: int | None) -> list[int]:
    start = zlib.crc32(array("q", prompt).tobytes()) % len(ring)
    ids = (ring[start:] + ring * (count // len(ring) + 1))[:count]
    if stop is not None and ids:
        ids[-1] = stop
    return ids


class Writer:
    """Owns the encoded form of every id, so that a long reply is one join."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._ring = _ring(script.vocab_size)
        self._plain = [b"%d" % token for token in range(script.vocab_size)]
        self._triples = [
            orjson.dumps([logprob_of(token), token, None]) for token in range(script.vocab_size)
        ]

    def generation(self, prompt: list[int], sampling: Json, reply: Reply) -> Generation:
        """What a request gets, its reply's faults included."""
        limit, length = sampling.get("max_new_tokens", 128), self._script.tokens
        stop = None
        if length is not None and length <= limit:
            stop = (sampling.get("stop_token_ids") or [self._script.eos_id])[0]
        ids = reply.ids
        if ids is None:
            ids = _ids(
                self._ring, prompt, limit if length is None or stop is None else length, stop
            )
        elif ids:
            stop = ids[-1]
        reason: Json = {"type": "length", "length": len(ids)}
        if stop is not None:
            reason = {"type": "stop", "matched": stop}
        logprobs = reply.logprobs
        match reply.fault:
            case "wrong_lengths":
                logprobs = [logprob_of(token) for token in ids[:-1]]
            case "out_of_vocab":
                ids = [*ids[:-1], self._script.vocab_size + 7]
            case "null":
                logprobs = [None] * len(ids)  # type: ignore[list-item]
            case "abort":
                reason = {**ABORTED, "message": "scripted", "status_code": reply.status}
        return Generation(ids, logprobs, reply.finish_reason or reason)

    def body(self, ids: list[int], logprobs: list[float] | None, meta: Json) -> bytes:
        """The JSON of a reply or an event."""
        if logprobs is None and max(ids, default=0) < len(self._plain):
            triples = b",".join([self._triples[token] for token in ids])
            plain = b",".join([self._plain[token] for token in ids])
        else:
            given = [logprob_of(token) for token in ids] if logprobs is None else logprobs
            triples = orjson.dumps([[p, t, None] for p, t in zip(given, ids, strict=False)])[1:-1]
            plain = orjson.dumps(ids)[1:-1]
        head = b'{"text":"","output_ids":[%b],"meta_info":{"output_token_logprobs":[%b],'
        return head % (plain, triples) + orjson.dumps(meta)[1:] + b"}"


def meta_info(rid: str, prompt: list[int], count: int, version: str, reason: Json | None) -> Json:
    """``meta_info`` but for the logprobs; an event that is not the last has no reason."""
    meta: Json = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": version,
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs_length": count,
        "e2e_latency": 0.001,
    }
    if reason:
        meta["weight_versions"] = [{"version": version, "start": 0, "end": count}]
    return meta


def refusal(prompt: list[int], sampling: Json, context_length: int) -> str | None:
    """SGLang's words for a prompt or a total that is too long."""
    new = sampling.get("max_new_tokens", 128)
    if len(prompt) >= context_length:
        return (
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if len(prompt) + new > context_length:
        return (
            f"Requested token count exceeds the model's maximum context length of "
            f"{context_length} tokens. You requested a total of {len(prompt) + new} tokens: "
            f"{len(prompt)} tokens from the input messages and {new} tokens for the completion."
        )
    return None
