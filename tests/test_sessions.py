"""Sessions: what they are called, when they end, and which rows they leave."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollout_workers.errors import BadRequest, Conflict, NotFound, RolloutError
from rollout_workers.identity import (
    new_response_id,
    parse_flag,
    parse_size,
    session_name,
    session_of,
)
from rollout_workers.ledger import Message, Sampled, root_key
from rollout_workers.schema import Span, TurnRecord, record_batch, row_schema
from rollout_workers.sessions import (
    Declaration,
    Outcome,
    Session,
    Sessions,
    check_identifier,
    result,
    rows,
)

SCHEMA = row_schema("m", "d")
ROOT = root_key("t", {})


def add_turn(
    session: Session,
    *history: str,
    generated: int = 2,
    finish: str = "stop",
    versions: tuple[int, ...] = (0,),
) -> str:
    """A turn with history of alternating user and assistant texts; returns its response id."""
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(history)]
    plan = session.ledger.plan(ROOT, messages)
    number = len(session.ledger.turns)
    response_id = f"resp_{number}"
    edges = np.linspace(0, generated, len(versions) + 1).astype(int).tolist()
    sampled = Sampled(
        ids=np.arange(generated, dtype=np.int32),
        logprobs=np.full(generated, -0.5, np.float32),
        spans=tuple(
            Span(start=a, end=b, version=v)
            for a, b, v in zip(edges, edges[1:], versions, strict=False)
        ),
        record=TurnRecord(
            response_id=response_id, start=0, end=generated, finish_reason=finish, worker="w0"
        ),
    )
    context = np.array([7, 7, 7], np.int32)
    session.ledger.commit(plan, context, sampled, Message(role="assistant", content=f"r{number}"))
    session.items.append([{"turn": number}])
    session.responses[response_id] = number
    return response_id


def new(**fields: Any) -> Session:
    return Session(**({"id": "s", "touched": 0.0, "declared": True} | fields))


# Names.


@pytest.mark.parametrize("name", ["a", "g12.3", "A-b_c:d.e", "x" * 128])
def test_good_identifiers(name: str) -> None:
    check_identifier(name, "session_id")


@pytest.mark.parametrize(
    "name", ["", "x" * 129, "a b", "a/b", "a\n", "\na", "ä", "a\x00", None, 5, [], {}, b"a"]
)
def test_bad_identifiers(name: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_identifier(name, "session_id")
    assert caught.value.param == "session_id"


@pytest.mark.parametrize("session", ["s", "a_b", "_", "s:t", "x" * 128, "a.b-c_d:e"])
def test_response_ids_lead_back(session: str) -> None:
    first, second = new_response_id(0, session), new_response_id(0, session)
    assert session_of(first) == session_of(second) == session
    assert first != second


@pytest.mark.parametrize(
    "wrong",
    ["", "resp_", "resp__x", "resp_zzzz_y", "chatcmpl-1", "🙂", "resp_\u00ff\u00ff_1", 5, None],
)
def test_foreign_response_ids(wrong: Any) -> None:
    sessions = Sessions(10)
    with pytest.raises(NotFound):
        sessions.get(session_of(wrong))


def test_session_name() -> None:
    assert session_name("s", {}) == "s"
    assert session_name(None, {"metadata": {"session_id": "s"}}) == "s"
    assert session_name("s", {"metadata": {"session_id": "s"}}) == "s"
    assert session_name(None, {"metadata": None}) is None
    with pytest.raises(BadRequest) as caught:
        session_name("s", {"metadata": {"session_id": "t"}})
    assert caught.value.param == "metadata.session_id"


def test_header_values() -> None:
    assert parse_size(None, "h") is None
    assert parse_size("8", "h") == 8
    for wrong in ("", "-1", "1.5", "²", "x", " 8"):
        with pytest.raises(BadRequest):
            parse_size(wrong, "h")
    assert parse_flag(None, "h") is True
    assert parse_flag("False", "h") is False
    with pytest.raises(BadRequest):
        parse_flag("0", "h")


# Opening and declaring.


def test_open_is_idempotent() -> None:
    sessions = Sessions(10)
    first = sessions.open("s", 0, Declaration())
    assert sessions.open("s", 5, Declaration()) is first
    assert sessions.get("s") is first
    assert first.touched == 5
    assert not first.declared
    assert len(sessions) == 1
    assert "s" in sessions


@pytest.mark.parametrize("name", ["", "a b", "a\n", None, 5])
def test_open_checks_the_name(name: Any) -> None:
    sessions = Sessions(10)
    with pytest.raises(BadRequest):
        sessions.open(name, 0, Declaration())
    assert len(sessions) == 0


@pytest.mark.parametrize("name", ["other", "", None, [], {}])
def test_unknown_session(name: Any) -> None:
    with pytest.raises(NotFound) as caught:
        Sessions(10).get(name)
    assert caught.value.param == "session_id"


def test_declarations_add_up() -> None:
    sessions = Sessions(10)
    sessions.open("s", 0, Declaration(metadata={"a": 1}))
    session = sessions.open("s", 0, Declaration(group_id="g", group_size=4, metadata={"b": 2}))
    assert session.declared
    sessions.open("s", 0, Declaration(group_size=4))
    sessions.open("s", 0, Declaration(record=False))
    sessions.open("s", 0, Declaration())
    assert session.declaration == Declaration(
        group_id="g", group_size=4, record=False, metadata={"a": 1, "b": 2}
    )
    assert sessions.open("t", 0, Declaration(), declare=True).declared


@pytest.mark.parametrize(
    ("declaration", "param"),
    [
        (Declaration(group_id="a b"), "group_id"),
        (Declaration(group_id=""), "group_id"),
        (Declaration(group_id=["g"]), "group_id"),  # type: ignore[arg-type]
        (Declaration(group_size=4), "group_id"),
        (Declaration(group_id="g", group_size=0), "group_size"),
        (Declaration(group_id="g", group_size=-1), "group_size"),
        (Declaration(group_id="g", group_size=True), "group_size"),
        (Declaration(group_id="g", group_size=1.5), "group_size"),  # type: ignore[arg-type]
        (Declaration(group_id="g", group_size=2**31), "group_size"),
        (Declaration(metadata=[1]), "metadata"),  # type: ignore[arg-type]
        (Declaration(metadata={"a": object()}), "metadata"),
        (Declaration(metadata={"a": float("nan")}), "metadata"),
        (Declaration(metadata={"a": "\ud800"}), "metadata"),
    ],
)
def test_wrong_declaration_opens_nothing(declaration: Declaration, param: str) -> None:
    sessions = Sessions(10)
    with pytest.raises(BadRequest) as caught:
        sessions.open("s", 0, declaration)
    assert caught.value.param == param
    assert "s" not in sessions


@pytest.mark.parametrize(
    ("declaration", "param"),
    [
        (Declaration(group_id="other"), "group_id"),
        (Declaration(group_id="g", group_size=5), "group_size"),
    ],
)
def test_declared_otherwise(declaration: Declaration, param: str) -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration(group_id="g", group_size=4))
    with pytest.raises(Conflict) as caught:
        sessions.open("s", 0, declaration)
    assert caught.value.param == param
    assert session.declaration == Declaration(group_id="g", group_size=4)


# Finishing.


def test_finish_closes_to_new_turns() -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration())
    sessions.begin_finish(session, Outcome(reward=1.0))
    sessions.begin_finish(session, Outcome(reward=1.0))
    with pytest.raises(Conflict, match="another outcome"):
        sessions.begin_finish(session, Outcome(reward=2.0))
    with pytest.raises(Conflict, match="is finished"):
        sessions.open("s", 0, Declaration())
    assert session.outcome == Outcome(reward=1.0)


def test_finish_names_a_response_of_the_session() -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration())
    response_id = add_turn(session, "a")
    with pytest.raises(BadRequest) as caught:
        sessions.begin_finish(session, Outcome(response_id="resp_other"))
    assert caught.value.param == "response_id"
    assert session.outcome is None
    sessions.begin_finish(session, Outcome(response_id=response_id))


def test_outcome_values() -> None:
    session = new(declaration=Declaration(metadata={"a": 1, "b": 1}))
    outcome = Outcome.of(session.declaration, 1, [0, 0.5], "error", {"b": 2}, "resp_1", "why")
    assert outcome == Outcome(
        reward=1.0,
        turn_rewards=(0.0, 0.5),
        status="error",
        metadata='{"a": 1, "b": 2}',
        response_id="resp_1",
        error="why",
    )
    assert Outcome.of(Declaration()) == Outcome()
    assert Outcome.of(Declaration(), reward=0) != Outcome.of(Declaration())
    assert type(outcome.reward) is float


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("reward", float("nan"), "reward"),
        ("reward", float("inf"), "reward"),
        ("reward", 10**400, "reward"),
        ("reward", 10**5000, "reward"),
        ("reward", "1", "reward"),
        ("reward", True, "reward"),
        ("reward", [1.0], "reward"),
        ("turn_rewards", 1.0, "turn_rewards"),
        ("turn_rewards", "12", "turn_rewards"),
        ("turn_rewards", [1.0, None], "turn_rewards[1]"),
        ("turn_rewards", [float("nan")], "turn_rewards[0]"),
        ("status", "done", "status"),
        ("status", ["error"], "status"),
        ("metadata", [1], "metadata"),
        ("metadata", "x", "metadata"),
        ("metadata", {"a": object()}, "metadata"),
        ("metadata", {"a": float("inf")}, "metadata"),
        ("metadata", {"a": "\ud800"}, "metadata"),
        ("metadata", {1: 1, "a": 2}, "metadata"),
        ("response_id", 5, "response_id"),
        ("error", {}, "error"),
        ("error", "\udfff", "error"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_wrong_outcome(field: str, value: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Outcome.of(Declaration(), **{field: value})
    assert caught.value.param == param


def test_metadata_without_an_end() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for metadata in (endless, {"a": deep}):
        with pytest.raises(BadRequest):
            Outcome.of(Declaration(), metadata=metadata)


# Rows.


def test_one_row_per_segment() -> None:
    session = new(declaration=Declaration(group_id="g", group_size=2))
    add_turn(session, "a", versions=(3,))
    add_turn(session, "a", "r0", "b", generated=4, versions=(3, 5), finish="length")
    add_turn(session, "other", versions=(6,))
    outcome = Outcome.of(session.declaration, 0.5, [1, 2, 3], None, {"k": "v"})
    made = rows(session, outcome, "run-1", 9)
    first, second = record_batch(made, SCHEMA).to_pylist()
    assert (first["segment"], second["segment"]) == (0, 1)
    assert first["num_segments"] == second["num_segments"] == 2
    assert first["trajectory_id"] == second["trajectory_id"] == session.trajectory_id
    assert (first["min_version"], first["max_version"]) == (3, 5)
    assert (second["min_version"], second["max_version"]) == (6, 6)
    assert (first["status"], second["status"]) == ("length", "completed")
    assert (first["segment_reason"], second["segment_reason"]) == ("start", "history_mismatch")
    assert json.loads(first["items"]) == [{"turn": 0}, {"turn": 1}]
    assert json.loads(second["items"]) == [{"turn": 2}]
    assert sum(first["loss_mask"] + second["loss_mask"]) == 8
    assert first["prompt_length"] == 3
    for row in (first, second):
        assert (row["reward"], row["turn_rewards"]) == (0.5, [1.0, 2.0, 3.0])
        assert (row["group_id"], row["group_size"], row["run_id"]) == ("g", 2, "run-1")
        assert json.loads(row["metadata"]) == {"k": "v"}
    told = result(session, made)
    assert told["row_ids"] == [f"{session.trajectory_id}/0", f"{session.trajectory_id}/1"]
    assert (told["turns"], told["status"]) == (3, "length")
    assert told["tokens"] == sum(len(row.token_ids) for row in made)


def test_session_that_never_generated_leaves_a_tombstone() -> None:
    session = new(declaration=Declaration(group_id="g", group_size=2))
    [row] = record_batch(rows(session, Outcome(), "run", 7), SCHEMA).to_pylist()
    assert (row["token_ids"], row["turns"], row["status"]) == ([], [], "error")
    assert (row["segment_reason"], row["group_id"]) == ("empty", "g")
    assert (row["min_version"], row["max_version"]) == (7, 7)
    [row] = record_batch(rows(session, Outcome(status="aborted"), "run", 7), SCHEMA).to_pylist()
    assert row["status"] == "aborted"


def test_evaluation_leaves_no_row() -> None:
    session = new(declaration=Declaration(record=False))
    add_turn(session, "a")
    assert rows(session, Outcome(reward=1.0), "run", 0) == []
    assert result(session, [])["status"] == "not_recorded"


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_one_reward_per_turn(rewards: tuple[float, ...]) -> None:
    session = new()
    add_turn(session, "a")
    add_turn(session, "a", "r0", "b")
    with pytest.raises(BadRequest, match="for 2 turns"):
        rows(session, Outcome(turn_rewards=rewards), "run", 0)


def test_finished_sessions_keep_only_the_answer() -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration())
    add_turn(session, "a")
    sessions.begin_finish(session, Outcome())
    sessions.end_finish(session, {"row_ids": []})
    assert session.result == {"row_ids": []}
    assert not session.ledger.turns
    assert not session.items
    assert sessions.get("s") is session


# Ends.


def test_idle_sessions_expire() -> None:
    sessions = Sessions(10)
    old, busy, young = (sessions.open(name, 0, Declaration()) for name in ("old", "busy", "young"))
    busy.in_flight = 1
    sessions.touch(young, 5)
    assert sessions.expired(9.9) == []
    assert sessions.expired(10) == [old]
    sessions.drop(old)
    assert sessions.expired(10) == []
    assert sessions.expired(15) == [young]
    sessions.drop(young)
    busy.in_flight = 0
    assert sessions.expired(19) == []  # it was in use at 10
    assert sessions.expired(20) == [busy]


def test_ephemeral_sessions_expire_sooner_and_long_turns_hold_up_nobody() -> None:
    sessions = Sessions(100, ephemeral_ttl_s=5)
    for number in range(200):
        sessions.open(f"busy{number}", 0, Declaration()).in_flight = 1
    named = sessions.open("named", 0, Declaration())
    passing = sessions.open("eph-1", 0, Declaration(), ephemeral=True)
    assert sessions.expired(5) == [passing]
    sessions.drop(passing)
    assert sessions.expired(100) == [named]


def test_thousands_of_finished_sessions_are_forgotten_at_once() -> None:
    sessions = Sessions(10)
    for number in range(5_000):
        session = sessions.open(f"s{number}", 0, Declaration())
        sessions.begin_finish(session, Outcome())
        sessions.end_finish(session, {})
    assert sessions.expired(10) == []
    assert len(sessions) == 0


def test_a_group_has_one_size() -> None:
    sessions = Sessions(10)
    with pytest.raises(BadRequest) as missing:
        sessions.open("g.0", 0, Declaration(group_id="g"))
    assert missing.value.param == "group_size" and "g.0" not in sessions
    sessions.open("g.0", 0, Declaration(group_id="g", group_size=2))
    assert sessions.open("g.1", 0, Declaration(group_id="g")).declaration.group_size == 2
    with pytest.raises(Conflict):
        sessions.open("g.2", 0, Declaration(group_id="g", group_size=3))


def test_finished_sessions_are_forgotten_after_the_ttl() -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration())
    sessions.begin_finish(session, Outcome())
    sessions.end_finish(session, {})
    assert sessions.expired(9) == []
    assert "s" in sessions
    assert sessions.expired(10) == []
    assert "s" not in sessions


def test_few_expire_at_a_time() -> None:
    sessions = Sessions(10)
    for number in range(100):
        sessions.open(f"s{number}", number / 100, Declaration())
    ended = sessions.expired(20, limit=64)
    assert [session.id for session in ended] == [f"s{i}" for i in range(64)]


async def test_settling() -> None:
    sessions = Sessions(10)
    session = sessions.open("s", 0, Declaration())
    waiting = session.idle
    session.in_flight = 1
    sessions.settle(session, 1)
    assert not waiting.is_set()
    session.in_flight = 0
    add_turn(session, "a")
    sessions.settle(session, 2)
    assert waiting.is_set()
    assert not session.idle.is_set()
    assert session.touched == 2
    assert "s" in sessions  # it has a turn that may be finished by its response id


async def test_ephemeral_session_without_a_turn_is_dropped() -> None:
    sessions = Sessions(10)
    sessions.settle(sessions.open("e", 0, Declaration(), ephemeral=True), 1)
    assert "e" not in sessions
    sessions.settle(sessions.open("s", 0, Declaration()), 1)
    assert "s" in sessions
    finishing = sessions.open("f", 0, Declaration(), ephemeral=True)
    finishing.outcome = Outcome()
    sessions.settle(finishing, 1)
    assert "f" in sessions


def test_errors_of_this_module_say_which_field() -> None:
    """Every refusal above is ours, with a parameter."""
    sessions = Sessions(10)
    for call in (
        lambda: sessions.get("nope"),
        lambda: sessions.open("a b", 0, None),
        lambda: Outcome.of(Declaration(), reward="x"),
    ):
        with pytest.raises(RolloutError) as caught:
            call()
        assert caught.value.param
