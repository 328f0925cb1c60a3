"""One reply of SGLang's ``/generate``, checked before anyone trusts it. Pure.

Ids and logprobs come from the engine's reply alone. A reply whose lists disagree, that holds an id
outside the vocabulary, or whose version spans do not tile it, is an error and never repaired. So is
one in which the engine put other values in the place of NaNs.
Shapes and traps: SGLang 0.5.23, `srt/managers/io_struct.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from rollout_workers.errors import (
    BadEngineReply,
    BadRequest,
    ContextOverflow,
    RolloutError,
    WorkerLost,
)
from rollout_workers.schema import LOGPROB_TOLERANCE, Ids, Logprobs, Span

_OVERFLOW = ("context length", "maximum allowed length")  # the engine has no code for it
_LEAST_LOGPROB = -1e30  # the engine writes the least float there is where it found -inf or NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One checked generation. Arrays are ``[num_generated]``; spans tile ``[0, num_generated)``."""

    ids: Ids
    logprobs: Logprobs
    spans: tuple[Span, ...]
    finish_reason: str  # stop, length
    matched: int | str | None  # the stop token or stop string that ended it
    cached_tokens: int
    seconds: float


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    weight_versions: list[_Version] = []
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_LOGPROB, _ID = operator.itemgetter(0), operator.itemgetter(1)
_decode = msgspec.json.Decoder(_Reply).decode


def read_reply(
    raw: bytes,
    rid: str,
    num_prompt: int,
    vocab_size: int,
    stop: Collection[str],
    seconds: float,
) -> Generation:
    """Check one reply of ``/generate`` and turn it into arrays; ``stop`` are its stop strings.

    Raises:
        BadEngineReply: anything about it cannot be trained on; says which and by how much.
        WorkerLost: the engine cut the generation.
        BadRequest: the engine refused the request after admitting it.
    """
    try:
        reply = _decode(raw)
    except msgspec.DecodeError as error:
        raise BadEngineReply(f"{rid}: reply is not what /generate answers: {error}") from None
    meta = reply.meta_info
    finish = meta.finish_reason or _Finish(type="missing")
    if finish.type not in ("stop", "length"):
        raise _abort(rid, finish)
    if isinstance(finish.matched, str) and finish.matched not in stop:
        # After "NaN happened" the last id is one the engine put there, not one it sampled.
        raise BadEngineReply(f"{rid}: ended by {finish.matched!r:.80}, which is no stop string")
    triples = meta.output_token_logprobs
    count = len(reply.output_ids)
    if triples is None or len(triples) != count:
        got = "no" if triples is None else str(len(triples))
        raise BadEngineReply(f"{rid}: {count} ids came with {got} logprobs")
    if meta.completion_tokens != count:
        raise BadEngineReply(f"{rid}: engine counts {meta.completion_tokens} tokens, sent {count}")
    if meta.prompt_tokens != num_prompt:
        raise BadEngineReply(f"{rid}: engine saw {meta.prompt_tokens} prompt ids, not {num_prompt}")
    ids, logprobs = _arrays(rid, reply.output_ids, triples, vocab_size)
    return Generation(
        ids=ids,
        logprobs=logprobs,
        spans=_spans(rid, meta.weight_versions, count),
        finish_reason=finish.type,
        matched=finish.matched,
        cached_tokens=meta.cached_tokens,
        seconds=seconds,
    )


def _abort(rid: str, finish: _Finish) -> RolloutError:
    if finish.status_code is not None and 400 <= finish.status_code < 500:
        return client_error(finish.message or "refused by the engine")
    return WorkerLost(f"{rid}: engine ended with {finish.type}: {finish.message}")


def _arrays(
    rid: str,
    output_ids: list[int],
    triples: list[tuple[float | None, int, str | None]],
    vocab_size: int,
) -> tuple[Ids, Logprobs]:
    count = len(triples)
    named = list(map(_ID, triples))
    if named != output_ids:
        at = next(i for i in range(count) if named[i] != output_ids[i])
        raise BadEngineReply(
            f"{rid}: logprob {at} names id {named[at]}, output has {output_ids[at]}"
        )
    try:
        ids = np.fromiter(output_ids, np.int64, count)
    except OverflowError:
        raise BadEngineReply(f"{rid}: an id does not fit 64 bits") from None
    if count and int(ids.view(np.uint64).max()) >= vocab_size:  # a negative one is huge there
        raise BadEngineReply(f"{rid}: an id lies outside the vocabulary of {vocab_size}")
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is found below
            logprobs = np.fromiter(map(_LOGPROB, triples), np.float32, count)
    except TypeError:
        at = next(i for i, triple in enumerate(triples) if triple[0] is None)
        raise BadEngineReply(f"{rid}: logprob {at} is nan") from None
    # NaN compares as false, so it is not sound either.
    if count and not (logprobs.max() <= LOGPROB_TOLERANCE and logprobs.min() >= _LEAST_LOGPROB):
        sound = (logprobs >= _LEAST_LOGPROB) & (logprobs <= LOGPROB_TOLERANCE)
        at = int(np.flatnonzero(~sound)[0])
        raise BadEngineReply(f"{rid}: logprob {at} is {logprobs[at]}")
    return ids.astype(np.int32), logprobs


def _spans(rid: str, versions: list[_Version], count: int) -> tuple[Span, ...]:
    try:
        spans = [Span(start=v.start, end=v.end, version=_number(v.version)) for v in versions]
    except ValueError as error:
        raise BadEngineReply(f"{rid}: a weight version is not a number: {error}") from None
    spans = [span for span in spans if span.end > span.start]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count:
        raise BadEngineReply(f"{rid}: version spans {versions} do not tile {count} tokens")
    return tuple(spans)


def _number(version: str) -> int:
    number = int(version)
    if number.bit_length() > 63:
        raise ValueError(f"{version:.40} does not fit 64 bits")
    return number


def client_error(message: str) -> BadRequest:
    kind = ContextOverflow if any(words in message for words in _OVERFLOW) else BadRequest
    return kind(message[:500], "input")
