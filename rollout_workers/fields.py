"""The table of Responses fields: honoured, accepted without effect, or refused as unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from rollout_workers.config import check_temperature

Json = dict[str, Any]
Number = StrictFloat | StrictInt


class Body(BaseModel):
    """Fields of a Responses create call that this pool takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # honoured
    input: StrictStr | list[Any]
    model: StrictStr | None = None
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2), AfterValidator(check_temperature)] | None = (
        None
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    metadata: dict[StrictStr, StrictStr] | None = None
    # honoured, beyond OpenAI's
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]] | None = None
    ignore_eos: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    # accepted: they ask for nothing, or for what happens anyway
    background: Literal[False] | None = None
    conversation: None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    n: Literal[1] | None = None
    parallel_tool_calls: StrictBool | None = None  # there are no tools to call
    previous_response_id: None = None
    prompt: None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: None = None
    reasoning: None = None
    safety_identifier: StrictStr | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: StrictBool | None = None  # nothing is kept for retrieval: the reply says false
    stream: Literal[False] | None = None
    stream_options: None = None
    text: Json | None = None
    tool_choice: Literal["auto", "none"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    user: StrictStr | None = None


# Keys of a message that are understood, or that change nothing: what a reply's own items hold.
MESSAGE_KEYS = frozenset(
    {
        "type",
        "role",
        "content",
        "id",
        "status",
        "phase",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
        "routed_experts",
        "rollout",
    }
)

# What the reply says of fields that the request left out; the request's own value where it has one.
ECHOED_DEFAULTS: Json = {
    "background": False,
    "instructions": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


def half_pair(body: Json) -> str | None:
    """Where a body holds half of a surrogate pair, which UTF-8 cannot spell; None if nowhere."""
    try:
        msgspec.json.encode(body)
    except Exception:  # also of what is not JSON; only then it is worth a look at each value
        return _half_pair(body)
    return None


def _half_pair(body: Json) -> str | None:
    rest: list[tuple[str, Any]] = [("", body)]
    while rest:
        path, value = rest.pop()
        if isinstance(value, str):
            if not is_unicode(value):
                return path
        elif isinstance(value, list | tuple):
            rest += ((f"{path}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, Mapping):
            if not all(is_unicode(key) for key in value if isinstance(key, str)):
                return path or "body"
            rest += ((f"{path}.{key}" if path else str(key), v) for key, v in value.items())
    return None


def is_unicode(value: str) -> bool:
    """False with half of a surrogate pair, which neither UTF-8 nor an Arrow column can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
