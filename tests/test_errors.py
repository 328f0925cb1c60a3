"""Errors cross process boundaries whole, and carry OpenAI's body and a status."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import openai
import pytest

from rollout_workers import errors
from rollout_workers.errors import RolloutError


def _classes(base: type[RolloutError] = RolloutError) -> Iterator[type[RolloutError]]:
    yield base
    for child in base.__subclasses__():
        yield from _classes(child)


ALL = sorted(set(_classes()), key=lambda kind: kind.__name__)
EVERY = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)


@EVERY
@pytest.mark.parametrize(
    "args",
    [
        (),
        ("why",),
        ("why", "input[0]"),
        ("why", "input[0]", "a_code", "req_1", "worker-3"),
        ("why", None, None, None, "worker-3"),
    ],
    ids=len,
)
def test_pickle_round_trip(kind: type[RolloutError], args: tuple[str, ...]) -> None:
    error = kind(*args)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert str(again) == str(error) == error.message
    assert again.body() == error.body()
    assert (again.status, again.retryable, again.args) == (kind.status, kind.retryable, error.args)


@EVERY
def test_cause_and_traceback_do_not_hinder_pickling(kind: type[RolloutError]) -> None:
    try:
        try:
            raise OSError("the cause")
        except OSError as cause:
            raise kind("why") from cause
    except RolloutError as error:
        assert str(pickle.loads(pickle.dumps(error))) == "why"


@EVERY
def test_body_is_what_openai_expects(kind: type[RolloutError]) -> None:
    body = kind("why", "input[0]", None, "req_1").body()
    assert body == {
        "error": {
            "message": "why",
            "type": kind.kind,
            "param": "input[0]",
            "code": kind.default_code,
        }
    }
    assert openai.types.shared.ErrorObject.model_validate(body["error"]).param == "input[0]"


@EVERY
def test_every_class_says_what_to_do(kind: type[RolloutError]) -> None:
    assert 400 <= kind.status < 600
    assert kind.__doc__
    if kind.status in (400, 401, 404, 409):
        assert not kind.retryable
    assert kind("why", None, "own_code").code == "own_code"


def test_every_class_is_public() -> None:
    """An error class elsewhere would need the module that raised it to be imported."""
    assert {kind.__module__ for kind in ALL} == {errors.__name__}


def test_a_wrong_config_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="why"):
        raise errors.ConfigError("why")
