"""Bodies in: every field is honoured, accepted or refused by name, and nothing else is raised."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from rollout_workers.config import SamplingConfig
from rollout_workers.errors import BadRequest
from rollout_workers.ledger import Message
from rollout_workers.responses import Request, SamplingParams, parse

DEFAULTS = SamplingConfig()
HI = [{"role": "user", "content": "hi"}]


def take(**body: Any) -> Request:
    return parse({"input": "hi", **body}, DEFAULTS)


def refused(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        take(**body)
    return caught.value


def said(**body: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in take(**body).messages]


# Fields, one by one.

HONOURED: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0, "temperature", 0.0),
    ("temperature", 0.5, "temperature", 0.5),
    ("temperature", 2, "temperature", 2.0),
    ("temperature", 1e-6, "temperature", 1e-6),
    ("top_p", 0.9, "top_p", 0.9),
    ("top_p", 1, "top_p", 1.0),
    ("top_k", 5, "top_k", 5),
    ("top_k", -1, "top_k", -1),
    ("min_p", 0.1, "min_p", 0.1),
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("stop", "END", "stop", ("END",)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("stop", [], "stop", ()),
    ("stop_token_ids", [0, 7], "stop_token_ids", (0, 7)),
    ("ignore_eos", True, "ignore_eos", True),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), HONOURED)
def test_sampling_is_honoured(field: str, value: Any, name: str, expected: Any) -> None:
    sampling = take(**{field: value}).sampling
    assert getattr(sampling, name) == expected
    assert type(getattr(sampling, name)) is type(expected)


def test_other_fields_are_honoured() -> None:
    request = take(
        model="m",
        max_output_tokens=7,
        return_token_ids=True,
        instructions="be kind",
        metadata={"a": "b"},
    )
    assert (request.model, request.max_output_tokens, request.return_token_ids) == ("m", 7, True)
    assert request.messages[0] == Message(role="system", content="be kind")
    assert request.echo == {"instructions": "be kind", "metadata": {"a": "b"}}
    assert request.input == "hi"


ACCEPTED: list[tuple[str, Any]] = [
    ("background", False),
    ("include", []),
    ("n", 1),
    ("parallel_tool_calls", True),
    ("parallel_tool_calls", False),
    ("prompt_cache_key", "k"),
    ("safety_identifier", "u"),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("store", True),
    ("store", False),
    ("stream", False),
    ("text", {}),
    ("text", {"format": {"type": "text"}}),
    ("text", {"format": None, "verbosity": None}),
    ("tool_choice", "auto"),
    ("tool_choice", "none"),
    ("tools", []),
    ("top_logprobs", 0),
    ("truncation", "disabled"),
    ("user", "u"),
]


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_accepted_without_effect(field: str, value: Any) -> None:
    given_, plain = take(**{field: value}), take()
    assert (given_.messages, given_.sampling) == (plain.messages, plain.sampling)
    assert given_.max_output_tokens is None


REFUSED: list[tuple[str, Any, str]] = [
    ("background", True, "unsupported_value"),
    ("bogus", 1, "unknown_parameter"),
    ("conversation", "c", "unsupported_value"),
    ("frequency_penalty", 2.1, "invalid_value"),
    ("ignore_eos", "yes", "invalid_value"),
    ("include", ["zzz"], "unsupported_value"),
    ("input", 5, "invalid_value"),
    ("input", None, "invalid_value"),
    ("input", {}, "invalid_value"),
    ("instructions", 1, "invalid_value"),
    ("instructions", [], "invalid_value"),
    ("max_output_tokens", "5", "invalid_value"),
    ("max_output_tokens", -1, "invalid_value"),
    ("max_output_tokens", 0, "invalid_value"),
    ("max_output_tokens", 1.0, "invalid_value"),
    ("max_output_tokens", 10**30, "invalid_value"),
    ("max_output_tokens", True, "invalid_value"),
    ("max_tool_calls", 1, "unsupported_value"),
    ("metadata", [], "invalid_value"),
    ("metadata", {"a" * 65: "b"}, "invalid_value"),
    ("metadata", {str(i): "v" for i in range(17)}, "invalid_value"),
    ("min_p", 1.5, "invalid_value"),
    ("model", 3, "invalid_value"),
    ("n", 2, "unsupported_value"),
    ("parallel_tool_calls", "no", "invalid_value"),
    ("presence_penalty", -2.1, "invalid_value"),
    ("previous_response_id", "resp_1", "unsupported_value"),
    ("prompt", {"id": "p"}, "unsupported_value"),
    ("reasoning", {"effort": "low"}, "unsupported_value"),
    ("repetition_penalty", 0, "invalid_value"),
    ("return_token_ids", 1, "invalid_value"),
    ("seed", 7, "unknown_parameter"),
    ("service_tier", "flex", "unsupported_value"),
    ("service_tier", [1], "unsupported_value"),
    ("stop", "", "invalid_value"),
    ("stop", ["a", ""], "invalid_value"),
    ("stop", ["a", 1], "invalid_value"),
    ("stop", ["a"] * 17, "invalid_value"),
    ("stop_token_ids", [-1], "invalid_value"),
    ("stop_token_ids", [2**31], "invalid_value"),
    ("stop_token_ids", [True], "invalid_value"),
    ("store", "yes", "invalid_value"),
    ("stream", True, "unsupported_value"),
    ("stream_options", {"include_obfuscation": False}, "unsupported_value"),
    ("temperature", "1", "invalid_value"),
    ("temperature", -1, "invalid_value"),
    ("temperature", 2.1, "invalid_value"),
    ("temperature", 1e-7, "invalid_value"),
    ("temperature", 5e-324, "invalid_value"),
    ("temperature", 10**400, "invalid_value"),
    ("temperature", float("inf"), "invalid_value"),
    ("temperature", float("nan"), "invalid_value"),
    ("temperature", True, "invalid_value"),
    ("text", "json", "invalid_value"),
    ("tool_choice", "required", "unsupported_value"),
    ("tool_choice", {"type": "function", "name": "f"}, "unsupported_value"),
    ("tools", [{"type": "function", "name": "f"}], "unsupported_value"),
    ("top_k", 0, "invalid_value"),
    ("top_k", -2, "invalid_value"),
    ("top_k", 1.5, "invalid_value"),
    ("top_k", 2**31, "invalid_value"),
    ("top_logprobs", 50, "unsupported_value"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.1, "invalid_value"),
    ("top_p", float("nan"), "invalid_value"),
    ("truncation", "auto", "unsupported_value"),
    ("user", 1, "invalid_value"),
]


@pytest.mark.parametrize(("field", "value", "code"), REFUSED)
def test_refused_by_name(field: str, value: Any, code: str) -> None:
    error = refused(**{field: value})
    assert (error.status, error.param, error.code) == (400, field, code)
    assert field in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize("field", ["temperature", "max_output_tokens", "model", "input", "n"])
def test_numbers_that_python_does_not_print(field: str) -> None:
    assert refused(**{field: 10**5000}).param == field
    assert refused(input=[{"type": 10**5000}]).param == "input[0].type"
    part = {"type": 10**5000}
    assert refused(input=[{"role": "user", "content": [part]}]).param == "input[0].content[0]"


def test_echo_has_the_types_of_the_api() -> None:
    """Python takes 0 for False; the reply says false."""
    assert take(background=0).echo["background"] is False
    assert type(take(top_logprobs=False).echo["top_logprobs"]) is int


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"metadata": {"key": "v" * 513}}, "metadata.key"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "r", "schema": {}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"bogus": 1}}, "text.bogus"),
    ],
)
def test_refused_inside_a_field(body: Any, param: str) -> None:
    assert refused(**body).param == param


def test_metadata_at_its_limits() -> None:
    assert take(metadata={str(i).zfill(64): "v" * 512 for i in range(16)}).echo["metadata"]
    assert refused(metadata={"a": 1}).param == "metadata"


DOCUMENTED = sorted(ResponseCreateParamsNonStreaming.__annotations__)


@pytest.mark.parametrize("field", sorted({*DOCUMENTED, *(f for f, *_ in HONOURED + ACCEPTED)}))
def test_null_equals_absent(field: str) -> None:
    """SDKs send null for what their caller left out; no documented field is unknown."""
    if field == "input":
        assert refused(input=None).param == "input"
    else:
        assert take(**{field: None}) == take()


def test_missing_input() -> None:
    with pytest.raises(BadRequest) as caught:
        parse({"model": "m"}, DEFAULTS)
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")


@pytest.mark.parametrize("body", [None, [], "hi", 3])
def test_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body, DEFAULTS)
    assert caught.value.param == "body"


def test_defaults_of_the_pool_fill_the_gaps() -> None:
    pool = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_output_tokens=99)
    request = parse({"input": "hi", "top_p": 1, "temperature": None}, pool)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.7,
        1.0,
        20,
        0.1,
    )
    assert request.max_output_tokens == 99
    assert parse({"input": "hi", "max_output_tokens": 3}, pool).max_output_tokens == 3


@pytest.mark.parametrize(
    ("body", "truncated", "penalised"),
    [
        ({}, False, False),
        ({"temperature": 0.5}, False, False),
        ({"top_p": 0.9}, True, False),
        ({"top_k": 3}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"top_p": 0.9, "temperature": 0}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": 0.1}, False, True),
        ({"frequency_penalty": -0.1}, False, True),
    ],
)
def test_sampling_names_its_distribution(body: Any, truncated: bool, penalised: bool) -> None:
    sampling = take(**body).sampling
    assert (sampling.truncated, sampling.penalised) == (truncated, penalised)


# Messages.


def test_text_input() -> None:
    assert said(input="hi") == [("user", "hi")]
    assert said(input=HI) == [("user", "hi")]


def test_instructions_system_and_developer_are_one_block() -> None:
    items = [
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "C"},
        {"role": "user", "content": "go"},
    ]
    assert said(instructions="A", input=items) == [
        ("system", "A\n\nB"),
        ("user", "hi"),
        ("system", "C"),
        ("user", "go"),
    ]
    for nothing in (None, ""):
        assert said(instructions=nothing, input=items)[0] == ("system", "B")
        assert said(instructions=nothing, input="hi") == [("user", "hi")]
    assert said(
        input=[{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, *HI]
    ) == [("system", "A\n\nB"), ("user", "hi")]


def test_parts_are_joined_in_order() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert said(input=[{"type": "message", "role": "user", "content": parts}]) == [("user", "ab")]
    parts = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "text", "text": ""}]
    replayed = [*HI, {"role": "assistant", "content": parts}, *HI]
    assert said(input=replayed)[1] == ("assistant", "c")


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x", "type": None, "id": None, "status": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": None}],
            "prompt_token_ids": [1],
            "generation_token_ids": [2],
            "generation_log_probs": [-0.5],
            "routed_experts": None,
            "phase": "final_answer",
            "tool_calls": None,
            "rollout": {"turn": 0},
        },
    ],
)
def test_own_replies_are_taken_back(item: Any) -> None:
    assert said(input=[*HI, item, *HI])[1] == ("assistant", "x")


@pytest.mark.parametrize("content", [None, [], ""])
def test_assistant_without_text(content: Any) -> None:
    assert said(input=[*HI, {"role": "assistant", "content": content}, *HI])[1] == (
        "assistant",
        "",
    )
    assert said(input=[*HI, {"role": "assistant"}, *HI])[1] == ("assistant", "")


def test_two_assistant_messages_in_a_row_stay_two() -> None:
    items = [*HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *HI]
    assert [role for role, _ in said(input=items)] == ["user", "assistant", "assistant", "user"]


USER: dict[str, Any] = {"role": "user", "content": "hi"}
BAD_INPUT: list[tuple[Any, str]] = [
    ("", "input"),
    ([], "input"),
    ([1], "input[0]"),
    ([None], "input[0]"),
    ([[]], "input[0]"),
    ([{}], "input[0].role"),
    ([{"content": "hi"}], "input[0].role"),
    ([{"role": "robot", "content": "hi"}], "input[0].role"),
    ([{"role": None, "content": "hi"}], "input[0].role"),
    ([{"role": ["user"], "content": "hi"}], "input[0].role"),
    ([{"role": "tool", "content": "hi"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": None}], "input[0].content"),
    ([{"role": "user", "content": 5}], "input[0].content"),
    ([{"role": "user", "content": {}}], "input[0].content"),
    ([{"role": "user", "content": ["hi"]}], "input[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": 1}]}],
        "input[0].content[0].text",
    ),
    ([{"role": "user", "content": [{"text": "hi"}]}], "input[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
    ([USER, {"role": "user", "content": [{"type": ["x"]}]}], "input[1].content[0]"),
    ([{"role": "user", "content": "\ud800"}], "input[0].content"),
    ([{"type": "function_call", "call_id": "c"}], "input[0].type"),
    ([USER, {"type": "function_call_output", "call_id": "c", "output": "x"}], "input[1].type"),
    ([USER, {"type": "reasoning", "summary": []}], "input[1].type"),
    ([USER, {"type": "item_reference", "id": "m"}], "input[1].type"),
    ([USER, {"type": 3}], "input[1].type"),
    ([USER, {"role": "assistant", "content": "x"}], "input[1]"),
    ([{"role": "system", "content": "x"}], "input"),
    ([{"role": "developer", "content": "x"}], "input"),
]


@pytest.mark.parametrize(("items", "param"), BAD_INPUT)
def test_bad_input_names_its_place(items: Any, param: str) -> None:
    error = refused(input=items)
    assert error.param == param
    assert len(error.message) < 500


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "file:///etc/hostname", "/etc/hostname"])
def test_no_url_is_followed(url: str) -> None:
    part = {"type": "input_image", "image_url": url}
    assert refused(input=[{"role": "user", "content": [part]}]).param == "input[0].content[0]"


HALF = "x\ud800"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instructions": "\udc00"}, "instructions"),
        ({"input": HALF}, "input"),
        ({"model": HALF}, "model"),
        ({"user": HALF}, "user"),
        ({"prompt_cache_key": HALF}, "prompt_cache_key"),
        ({"safety_identifier": HALF}, "safety_identifier"),
        ({"stop": HALF}, "stop"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"stop": ("a", HALF)}, "stop[1]"),
        ({"metadata": {"k": HALF}}, "metadata.k"),
        ({"metadata": {HALF: "v"}}, "metadata"),
        ({"text": {HALF: None}}, "text"),
        ({HALF: 1}, "body"),
        ({"service_tier": HALF, "max_output_tokens": 10**5000}, "service_tier"),
        ({"input": [{**USER, "id": HALF}]}, "input[0].id"),
        ({"input": [{**USER, HALF: None}]}, "input[0]"),
    ],
)
def test_half_a_surrogate_pair_names_its_place(body: Any, param: str) -> None:
    error = refused(**body)
    assert (error.status, error.param) == (400, param)
    assert (error.message + param).encode()


@pytest.mark.parametrize("key", ["name", "tool_calls", "function_call", "tool_call_id", "Content"])
def test_a_key_that_is_not_understood_is_refused_not_ignored(key: str) -> None:
    for value in ("x", [], {}, False):
        error = refused(input=[USER, {**USER, key: value}])
        assert error.param == f"input[1].{key}"
        assert "refused, not ignored" in error.message
    assert said(input=[{**USER, key: None}]) == [("user", "hi")]


# Whatever JSON holds.

TEXTS = st.text(max_size=8) | st.sampled_from(["message", "user", "assistant", "input_text"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
PART = st.fixed_dictionaries(
    {}, optional={"type": st.just("input_text") | JSON, "text": TEXTS | JSON}
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("message") | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": TEXTS | st.lists(PART | JSON, max_size=3) | JSON,
        "id": JSON,
    },
)
FIELDS = sorted({*DOCUMENTED, *(f for f, *_ in HONOURED), *(f for f, *_ in REFUSED)} - {"input"})
BODY = st.fixed_dictionaries(
    {"input": TEXTS | st.lists(ITEM | JSON, max_size=4) | JSON},
    optional=dict.fromkeys(FIELDS, JSON),
)


@given(BODY | st.dictionaries(TEXTS | st.sampled_from(FIELDS), JSON) | JSON)
@example({"input": [{"role": "user", "content": [{"type": {}}]}]})
def test_whatever_comes_is_parsed_or_refused(body: Any) -> None:
    try:
        request = parse(body, DEFAULTS)
    except BadRequest as error:
        assert error.param is not None
        assert error.message
    else:
        assert request.messages[-1].role != "assistant"
        assert isinstance(request.sampling, SamplingParams)
        for message in request.messages:
            assert message.content.encode() is not None
