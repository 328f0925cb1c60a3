"""A finished turn told as a Response object. Pure; `responses.py` is the way in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_workers.fields import ECHOED_DEFAULTS
from rollout_workers.ledger import Sampled, item_id
from rollout_workers.responses import Request
from rollout_workers.schema import Ids

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One finished turn, ready to be told as a Response."""

    response_id: str
    model: str
    text: str
    prompt: Ids
    sampled: Sampled
    created_at: float
    rollout: Json  # the namespaced object beside the token fields


def build(request: Request, reply: Reply, with_token_ids: bool) -> Json:
    """The Response object of a turn, as the ``openai`` package's own types accept it.

    With ``with_token_ids`` the output item carries ``prompt_token_ids``, ``generation_token_ids``
    and ``generation_log_probs``, as NeMo Gym and NeMo RL name them, beside one ``rollout`` object.
    """
    record = reply.sampled.record
    cut = record.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    return {
        **ECHOED_DEFAULTS,
        **_sampling_echo(request),
        **request.echo,
        "id": reply.response_id,
        "object": "response",
        "created_at": reply.created_at,
        "completed_at": None if cut else time.time(),
        "status": status,
        "error": None,
        "store": False,
        "model": reply.model,
        "output": [_output_message(reply, status, with_token_ids)],
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": _usage(len(reply.prompt), record.cached_tokens, len(reply.sampled.ids)),
        "rollout": reply.rollout,
    }


def items_json(items: list[Json]) -> str:
    """Items for the row's ``items`` column: for people and rubrics, never for training."""
    return msgspec.json.encode(items).decode()


def _output_message(reply: Reply, status: str, with_token_ids: bool) -> Json:
    part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
    item: Json = {
        "id": item_id(reply.sampled.record),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }
    if with_token_ids:
        item["prompt_token_ids"] = reply.prompt.tolist()
        item["generation_token_ids"] = reply.sampled.ids.tolist()
        item["generation_log_probs"] = reply.sampled.logprobs.tolist()
        item["rollout"] = reply.rollout
    return item


def _usage(prompt: int, cached: int, generated: int) -> Json:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def _sampling_echo(request: Request) -> Json:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_output_tokens": request.max_output_tokens,
    }
