"""Replies out: objects that the `openai` package's own types accept, with exact token fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local import HELLO, HI
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from rollout_workers.config import SamplingConfig
from rollout_workers.ledger import Sampled
from rollout_workers.reply import Reply, build
from rollout_workers.responses import parse
from rollout_workers.schema import Span, TurnRecord

TOKEN_FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "rollout"}
NAMES = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}


def make(finish: str = "stop", with_ids: bool = False, words: str = "hello", **body: Any) -> Any:
    record = TurnRecord(
        response_id="resp_abc", start=0, end=3, finish_reason=finish, worker="w0", cached_tokens=5
    )
    sampled = Sampled(
        ids=np.array(HELLO, np.int32),
        logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
        spans=(Span(start=0, end=3, version=0),),
        record=record,
    )
    reply = Reply(
        response_id="resp_abc",
        model="m",
        text=words,
        prompt=np.array(HI, np.int32),
        sampled=sampled,
        created_at=1.5,
        rollout={"turn": 0},
    )
    return build(parse({"input": "hi", **body}, SamplingConfig()), reply, with_ids)


def accepted(body: Any) -> Response:
    """Validate as the `openai` package would if it checked: over JSON, every type exact."""
    return Response.model_validate_json(msgspec.json.encode(body), strict=True)


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_openai_accepts_it(finish: str, with_ids: bool) -> None:
    response = accepted(make(finish, with_ids))
    assert response.id == "resp_abc"
    assert response.output_text == "hello"
    assert response.model == "m"
    assert response.error is None
    [item] = response.output
    assert isinstance(item, ResponseOutputMessage)
    assert item.role == "assistant"
    assert item.id.startswith("msg_")
    assert isinstance(item.content[0], ResponseOutputText)


@pytest.mark.parametrize(
    "body",
    [
        {"text": {}},
        {"text": {"format": None}},
        {"text": {"format": {"type": "text"}}},
        {"metadata": {"a": "b"}, "instructions": "be kind", "user": "u"},
        {"background": 0, "top_logprobs": False, "n": 1, "tools": [], "tool_choice": "none"},
        {"service_tier": "auto", "truncation": "disabled", "parallel_tool_calls": False},
        {"prompt_cache_key": "k", "safety_identifier": "s", "store": True, "include": []},
        {"temperature": 0, "top_p": 1, "max_output_tokens": 9, "stop": "x"},
    ],
)
def test_every_echo_is_acceptable(body: Any) -> None:
    accepted(make(**body))


def test_what_was_asked_is_echoed() -> None:
    body: dict[str, Any] = {
        "metadata": {"a": "b"},
        "instructions": "be kind",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "user": "u",
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    assert make(**body).items() >= body.items()
    assert make(store=True)["store"] is False  # nothing can be fetched later
    plain = make()
    assert (plain["temperature"], plain["top_p"], plain["max_output_tokens"]) == (1.0, 1.0, None)


def test_length_stop_is_visible() -> None:
    cut = accepted(make("length"))
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"
    whole = accepted(make("stop"))
    assert whole.status == whole.output[0].status == "completed"
    assert whole.incomplete_details is None


def test_usage_counts_ids() -> None:
    usage = accepted(make()).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (21, 3, 24)
    assert usage.input_tokens_details.cached_tokens == 5
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_token_fields_all_or_none() -> None:
    without = make(with_ids=False)
    assert not TOKEN_FIELDS & set(without["output"][-1])
    item = make(with_ids=True)["output"][-1]
    assert set(item) >= TOKEN_FIELDS
    assert item["prompt_token_ids"] == HI
    assert item["generation_token_ids"] == HELLO
    assert item["generation_log_probs"] == np.array([-0.1, -0.2, -0.3], np.float32).tolist()
    assert not NAMES & set(make(with_ids=True))  # once, on the item


def test_logprobs_survive_json_exactly() -> None:
    body = json.loads(msgspec.json.encode(make(with_ids=True)))
    sent = np.array(body["output"][-1]["generation_log_probs"], np.float32)
    assert (sent == np.array([-0.1, -0.2, -0.3], np.float32)).all()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    reply = make(words=text)
    assert accepted(reply).output_text == text
    user = {"role": "user", "content": "hi"}
    again = parse({"input": [user, *reply["output"], user]}, SamplingConfig())
    assert again.messages[1].content == text
