"""Responses bodies to chat messages. Pure; `reply.py` is the way back.

A field is honoured, accepted because it cannot change what is sampled, or refused with a 400 that
names it: ``Body`` in `fields.py` is the table. Text conversations only; tools, images and
streaming are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import StrictFloat, StrictInt
from pydantic import ValidationError as PydanticError

from rollout_workers.config import SamplingConfig
from rollout_workers.errors import BadRequest
from rollout_workers.fields import ECHOED_DEFAULTS, MESSAGE_KEYS, Body, half_pair
from rollout_workers.ledger import Message

Json = dict[str, Any]
Number = StrictFloat | StrictInt

_MAX_STOPS = 16
# Validation failures that mean: OpenAI documents this value, but the pool has no such feature.
_UNSUPPORTED = {"literal_error", "none_required", "too_long"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that shapes a distribution; all of it is sent, so no server default leaks in."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the distribution."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from a cut distribution while logprobs describe the whole."""
        greedy = self.temperature == 0
        return not greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One parsed call. ``max_output_tokens`` is None for what is left of the context."""

    messages: tuple[Message, ...]
    sampling: SamplingParams
    max_output_tokens: int | None
    return_token_ids: bool | None
    model: str | None
    echo: Json = field(default_factory=dict)  # fields as they came, for the reply
    input: Any = None


def parse(body: Mapping[str, Any], defaults: SamplingConfig) -> Request:
    """Check a body and turn it into chat messages and sampling parameters.

    Raises:
        BadRequest: 400 with the field in ``param``.
    """
    if not isinstance(body, Mapping):
        raise BadRequest(f"the body must be a JSON object, not {_kind(body)}", "body")
    if (path := half_pair(dict(body))) is not None:
        raise BadRequest(f"{path} holds half of a surrogate pair", path)
    try:
        parsed = Body.model_validate(dict(body))
    except PydanticError as error:
        raise _refusal(error) from None
    _check_metadata(parsed.metadata)
    _check_text(parsed.text)
    return Request(
        messages=tuple(_messages(parsed)),
        sampling=_sampling(parsed, defaults),
        max_output_tokens=_first(parsed.max_output_tokens, defaults.max_output_tokens),
        return_token_ids=parsed.return_token_ids,
        model=parsed.model,
        echo={k: v for k in ECHOED_DEFAULTS if (v := getattr(parsed, k)) is not None},
        input=parsed.input,
    )


def _refusal(error: PydanticError) -> BadRequest:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    value = problem["input"]
    shown = _shown(value)
    if problem["type"] == "extra_forbidden":
        return BadRequest(f"unknown parameter: {name}", name, "unknown_parameter")
    if problem["type"] == "missing":
        return BadRequest(f"missing required parameter: {name}", name, "missing_required_parameter")
    if problem["type"] in _UNSUPPORTED:
        return BadRequest(f"{name} is not supported with {shown}", name, "unsupported_value")
    if name == "input":
        return BadRequest(f"input must be text or a list of messages, got {shown}", name)
    path = ".".join(str(p) for p in problem["loc"] if not _is_union_tag(p))
    return BadRequest(f"{path}: {problem['msg']}, got {shown}", name)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return _kind(value)
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print some
        return "a huge number"
    return f"{value!r}"[:80]


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "bool"})


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    items = metadata or {}
    if len(items) > 16:
        raise BadRequest(f"metadata holds {len(items)} pairs, at most 16 are allowed", "metadata")
    for key, value in items.items():
        if len(key) > 64:
            raise BadRequest(f"metadata key {key[:20]}… is longer than 64 characters", "metadata")
        if len(value) > 512:
            raise BadRequest(f"metadata.{key} is longer than 512 characters", f"metadata.{key}")


def _check_text(text: Json | None) -> None:
    for key, value in (text or {}).items():
        plain = key == "format" and value in (None, {"type": "text"})
        if not plain and value is not None:
            raise BadRequest(f"text.{key} is not supported", f"text.{key}", "unsupported_value")


def _messages(body: Body) -> list[Message]:
    if isinstance(body.input, str):
        items: list[Any] = [{"role": "user", "content": body.input}]
    else:
        items = body.input
    if not items or body.input == "":
        raise BadRequest("input is empty: send text or at least one message", "input")
    messages = [_message(item, f"input[{i}]") for i, item in enumerate(items)]
    if messages[-1].role == "assistant":
        raise BadRequest(
            "input ends with an assistant message: nothing is left to answer",
            f"input[{len(items) - 1}]",
        )
    return _one_system_block(body.instructions, messages)


def _one_system_block(instructions: str | None, messages: list[Message]) -> list[Message]:
    """``instructions``, then leading system and developer text, as one system message.

    Later developer messages become system messages where they stand: most templates know no
    other role for them.
    """
    lead = [_text(instructions, "instructions")] if instructions else []
    rest = list(messages)
    while rest and rest[0].role == "system":
        lead.append(rest.pop(0).content)
    if not rest:
        raise BadRequest("input holds no user message", "input")
    return [Message(role="system", content="\n\n".join(lead)), *rest] if lead else rest


def _message(item: Any, path: str) -> Message:
    if not isinstance(item, Mapping):
        raise BadRequest(f"{path} must be an object, not {_kind(item)}", path)
    kind = item.get("type", "message")
    if kind not in (None, "message"):
        raise BadRequest(f"{path}: items of type {_shown(kind)} are not supported", f"{path}.type")
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(_ROLES)}", f"{path}.role")
    for key, value in item.items():
        if key not in MESSAGE_KEYS and value is not None:
            name = f"{path}.{key!s:.64}"
            raise BadRequest(f"{name} is not supported: refused, not ignored", name)
    content = _content(item, role, f"{path}.content")
    if role != "assistant":
        return Message(role="system" if role == "developer" else role, content=content)
    item_id = item.get("id")
    return Message(
        role=role,
        content=content,
        item_id=item_id if isinstance(item_id, str) else None,
        token_ids=_carried_ids(item, f"{path}.generation_token_ids"),
    )


def _carried_ids(item: Mapping[str, Any], path: str) -> tuple[int, ...] | None:
    ids = item.get("generation_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadRequest(f"{path} must be a list of token ids", path)
    return tuple(ids)


def _content(item: Mapping[str, Any], role: str, path: str) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return _text(content, path)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise BadRequest(f"{path} must be text or a list of parts, not {_kind(content)}", path)
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{path} must be an object, not {_kind(part)}", path)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise BadRequest(f"{path}: parts of type {_shown(kind)} are not supported", path)
    return _text(part.get("text"), f"{path}.text")


def _text(text: Any, path: str) -> str:
    if not isinstance(text, str):
        raise BadRequest(f"{path} must be a string, not {_kind(text)}", path)
    return text


def _sampling(body: Body, defaults: SamplingConfig) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > _MAX_STOPS or not all(stop):
        raise BadRequest(f"stop takes up to {_MAX_STOPS} strings, none empty", "stop")
    top_k = _first(body.top_k, defaults.top_k)
    if top_k == 0:
        raise BadRequest("top_k is -1 (off) or at least 1", "top_k")

    def value(name: str) -> float:
        return float(_first(getattr(body, name), getattr(defaults, name)))

    return SamplingParams(
        temperature=value("temperature"),
        top_p=value("top_p"),
        top_k=int(top_k),
        min_p=value("min_p"),
        presence_penalty=value("presence_penalty"),
        frequency_penalty=value("frequency_penalty"),
        repetition_penalty=value("repetition_penalty"),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(
        type(value), type(value).__name__
    )
