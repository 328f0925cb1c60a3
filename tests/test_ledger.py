"""The ledger: prompts grow by ids, every sampled id is trained once, and edits are never silent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_workers.ledger import (
    Ledger,
    Message,
    Plan,
    Sampled,
    SegmentReason,
    chain,
    root_key,
)
from rollout_workers.schema import Span, TurnRecord, check
from rollout_workers.sessions import Outcome, Session, rows

ROOT = root_key("template", {})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def sampled(*values: int, spans: Sequence[Span] | None = None) -> Sampled:
    """Ids with logprobs of their own; one version unless ``spans`` says otherwise."""
    count = len(values)
    whole = (Span(start=0, end=count, version=0),) if count else ()
    record = TurnRecord(
        response_id=f"resp_{values}", start=0, end=count, finish_reason="stop", worker="w0"
    )
    return Sampled(
        ids=ids(*values),
        logprobs=np.array([-value / 1024 for value in values], np.float32),
        spans=whole if spans is None else tuple(spans),
        record=record,
    )


def test_worked_example() -> None:
    ledger = Ledger()
    plan = ledger.plan(ROOT, [user("a")])
    assert plan == Plan(None, SegmentReason.START, 0, chain(ROOT, [user("a")])[-1])
    first = ledger.commit(plan, ids(1, 2, 3), sampled(7, 8), said("x"))

    plan = ledger.plan(ROOT, [user("a"), said("x"), user("b")])
    assert (plan.anchor, plan.reason, plan.new_from) == (first, SegmentReason.START, 2)
    assert ledger.prompt(first).tolist() == [1, 2, 3, 7, 8]
    assert ledger.ends_with(first) == 8
    ledger.commit(plan, ids(4, 5), sampled(9), said("y"))

    [segment] = ledger.segments()
    assert segment.path == (0, 1)
    assert segment.reason is SegmentReason.START
    assert segment.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5, 9]
    assert segment.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert segment.logprobs.tolist() == [0, 0, 0, -7 / 1024, -8 / 1024, 0, 0, -9 / 1024]
    assert [(s.start, s.end) for s in segment.spans] == [(3, 5), (7, 8)]
    assert [(t.start, t.end) for t in segment.turns] == [(3, 5), (7, 8)]
    assert segment.masked_elsewhere == 0


def test_planning_changes_nothing() -> None:
    ledger = Ledger()
    assert ledger.plan(ROOT, [user("a")]) == ledger.plan(ROOT, [user("a")])
    assert ledger.segments() == []


@pytest.fixture
def two_turns() -> tuple[Ledger, list[Message]]:
    ledger = Ledger()
    messages = [user("a")]
    for number, reply in enumerate(("x", "y")):
        plan = ledger.plan(ROOT, messages)
        ledger.commit(plan, ids(number + 1), sampled(number + 10), said(reply))
        messages += [said(reply), user(f"more {number}")]
    return ledger, messages


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", ["edit", "drop", "role", "insert"])
def test_any_edit_of_history_starts_a_segment(
    two_turns: tuple[Ledger, list[Message]], at: int, how: str
) -> None:
    ledger, messages = two_turns
    assert ledger.plan(ROOT, messages).anchor == 1
    edited = list(messages)
    match how:
        case "edit":
            edited[at] = Message(role=edited[at].role, content=edited[at].content + " ")
        case "drop":
            del edited[at]
        case "role":
            edited[at] = Message(role="system", content=edited[at].content)
        case "insert":
            edited.insert(at, said("never said"))
    plan = ledger.plan(ROOT, edited)
    if plan.anchor is None:
        assert (plan.reason, plan.new_from) == (SegmentReason.HISTORY, 0)
    else:  # what is left before the edit is a known history; all after it is rendered anew
        assert plan.new_from <= at
        assert plan.reason is SegmentReason.BRANCH


def test_message_bounds_are_part_of_the_key() -> None:
    split = chain(ROOT, [user("a"), user("b")])[-1]
    assert split != chain(ROOT, [user("ab")])[-1]
    assert split != chain(ROOT, [user("a\x00b")])[-1]
    assert split != chain(ROOT, [user("b"), user("a")])[-1]
    assert chain(ROOT, []) == []


def test_other_templates_or_options_never_share_a_prefix() -> None:
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(2), said("x"))
    longer = [user("a"), said("x"), user("b")]
    for other in (root_key("other", {}), root_key("template", {"enable_thinking": False})):
        plan = ledger.plan(other, longer)
        assert (plan.anchor, plan.reason) == (None, SegmentReason.HISTORY)
    assert root_key("t", {"a": 1, "b": 2}) == root_key("t", {"b": 2, "a": 1})


def test_template_that_cannot_go_on_starts_a_segment_with_its_reason() -> None:
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")], False), ids(1), sampled(2), said("x"))
    plan = ledger.plan(ROOT, [user("a"), said("x"), user("b")], bridgeable=False)
    assert plan.anchor is None
    assert (plan.reason, plan.new_from) == (SegmentReason.TEMPLATE, 0)


def test_history_that_ends_in_the_reply_is_no_extension() -> None:
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(2), said("x"))
    assert ledger.plan(ROOT, [user("a"), said("x")]).anchor is None


def test_branches_train_the_shared_turn_once() -> None:
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(2), said("x"))
    for text, context, reply in (("b", 3, 4), ("c", 5, 6)):
        plan = ledger.plan(ROOT, [user("a"), said("x"), user(text)])
        ledger.commit(plan, ids(context), sampled(reply), said(text))
    trunk, branch = ledger.segments()
    assert (trunk.reason, branch.reason) == (SegmentReason.START, SegmentReason.BRANCH)
    assert trunk.loss_mask.tolist() == [0, 1, 0, 1]
    assert branch.token_ids.tolist() == [1, 2, 5, 6]
    assert branch.loss_mask.tolist() == [0, 0, 0, 1]
    assert branch.logprobs.tolist()[1] == 0
    assert (trunk.masked_elsewhere, branch.masked_elsewhere) == (0, 1)


def test_a_second_answer_to_the_first_request_is_a_branch() -> None:
    ledger = Ledger()
    for answer in (4, 5):
        plan = ledger.plan(ROOT, [user("a")])
        ledger.commit(plan, ids(1), sampled(answer), said(str(answer)))
    assert [s.reason for s in ledger.segments()] == [SegmentReason.START, SegmentReason.BRANCH]
    assert ledger.plan(ROOT, [user("b")]).reason is SegmentReason.HISTORY


def test_a_branch_keeps_its_reason_when_the_trunk_grows_later() -> None:
    """The trunk is the first continuation, also when a branch ended before it did."""
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(2), said("x"))
    trunk = [user("a"), said("x"), user("b")]
    ledger.commit(ledger.plan(ROOT, trunk), ids(3), sampled(4), said("y"))
    branch = [user("a"), said("x"), user("c")]
    ledger.commit(ledger.plan(ROOT, branch), ids(5), sampled(6), said("z"))
    ledger.commit(ledger.plan(ROOT, [*trunk, said("y"), user("d")]), ids(7), sampled(8), said("v"))
    first, second = ledger.segments()
    assert first.path == (0, 1, 3)
    assert first.reason is SegmentReason.START
    assert first.masked_elsewhere == 0
    assert second.path == (0, 2)
    assert second.reason is SegmentReason.BRANCH
    assert second.masked_elsewhere == 1


def test_two_requests_at_once_on_one_turn() -> None:
    """Both were planned before either was committed."""
    ledger = Ledger()
    ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(2), said("x"))
    longer = [user("a"), said("x"), user("b")]
    plans = [ledger.plan(ROOT, longer) for _ in range(2)]
    for number, plan in enumerate(plans):
        ledger.commit(plan, ids(3), sampled(4 + number), said(f"y{number}"))
    assert [segment.reason for segment in ledger.segments()] == ["start", "branch"]


def same_words() -> Ledger:
    """One request, answered twice with the same words and different ids: turns 0 and 1."""
    ledger = Ledger()
    for value in (2, 3):
        ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(value), said("x"))
    return ledger


@pytest.mark.parametrize("meant", [0, 1])
def test_of_siblings_with_the_same_words_the_one_that_came_back_is_continued(meant: int) -> None:
    ledger = same_words()
    value = 2 + meant
    for told in (
        {"item_id": f"msg_({value},)"},
        {"token_ids": (value,)},
        {"token_ids": (value,), "item_id": "msg_unknown"},
    ):
        back = Message(role="assistant", content="x", **told)
        assert ledger.plan(ROOT, [user("a"), back, user("b")]).anchor == meant
    untold = ledger.plan(ROOT, [user("a"), said("x"), user("b")])
    assert untold.anchor == 1


def test_ids_that_no_turn_sampled_begin_a_segment() -> None:
    ledger = same_words()
    back = Message(role="assistant", content="x", token_ids=(9,))
    plan = ledger.plan(ROOT, [user("a"), back, user("b")])
    assert (plan.anchor, plan.reason) == (None, SegmentReason.IDS)


def test_an_answer_that_nobody_continued_is_not_trained() -> None:
    ledger = same_words()
    plan = ledger.plan(ROOT, [user("a"), said("x"), user("b")])
    ledger.commit(plan, ids(4), sampled(5), said("y"))
    excluded = ledger.excluded()
    assert excluded == {0}
    [segment] = ledger.segments(excluded)
    assert (segment.path, segment.reason) == ((1, 2), SegmentReason.START)
    assert segment.token_ids.tolist() == [1, 3, 4, 5]


def test_of_last_answers_only_the_named_one_is_trained() -> None:
    ledger = same_words()
    assert ledger.excluded(final=0) == {1}
    assert ledger.excluded() == {0, 1}
    assert ledger.segments({0, 1}) == []


def test_rows_count_what_is_not_trained() -> None:
    for final, trained, reason in ((None, 0, "ambiguous"), ("r1", 1, "start")):
        session = Session(id="s", touched=0, declared=True, ledger=same_words())
        session.items = [[], []]
        session.responses = {"r0": 0, "r1": 1}
        [row] = rows(session, Outcome(response_id=final), "run", 0)
        assert int(row.loss_mask.sum()) == trained
        assert row.tokens_excluded == 2 - trained
        assert row.segment_reason == reason


def test_empty_generation() -> None:
    ledger = Ledger()
    number = ledger.commit(ledger.plan(ROOT, [user("a")]), ids(1), sampled(), said(""))
    assert ledger.ends_with(number) is None
    [segment] = ledger.segments()
    assert segment.loss_mask.tolist() == [0]
    assert segment.spans == ()


# Random trees: what a client may do, told as (which known history, what it does to it).


@dataclass
class Step:
    messages: list[Message]  # the whole history, this turn's reply last
    prompt: list[int]
    generated: list[int]


@st.composite
def spans_of(draw: st.DrawFn, count: int) -> tuple[Span, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, count - 1)), max_size=2))) if count > 1 else []
    edges = [0, *cuts, count]
    version = draw(st.integers(0, 3))
    spans = []
    for start, end in itertools.pairwise(edges):
        if end > start:
            spans.append(Span(start=start, end=end, version=version))
            version += draw(st.integers(0, 2))
    return tuple(spans)


TOKENS = st.lists(st.integers(0, 99), max_size=4)
WORDS = st.sampled_from(["", "a", "b", "c"])


@given(st.data())
def test_random_trees(data: st.DataObject) -> None:
    draw = data.draw
    session = Session(id="s", touched=0, declared=True)
    ledger, steps = session.ledger, list[Step]()
    for number in range(draw(st.integers(0, 8))):
        known = draw(st.sampled_from([None, *range(len(steps))]))
        messages = [user(draw(WORDS))]
        if known is not None:
            messages = [*steps[known].messages, user(draw(WORDS))]
            if draw(st.booleans()) and draw(st.booleans()):
                at = draw(st.integers(0, len(messages) - 2))
                messages[at] = Message(role=messages[at].role, content=draw(WORDS))
        plan = ledger.plan(ROOT, messages, bridgeable=draw(st.integers(0, 5)) > 0)
        context = draw(TOKENS.filter(bool)) if plan.anchor is None else draw(TOKENS)
        prompt = context
        if plan.anchor is not None:
            before = steps[plan.anchor]
            assert messages[: plan.new_from] == before.messages
            prompt = before.prompt + before.generated + context
            assert ledger.prompt(plan.anchor).tolist() == before.prompt + before.generated
        else:
            assert plan.new_from == 0
        generated = draw(TOKENS)
        made = sampled(*generated, spans=draw(spans_of(len(generated))))
        reply = said(draw(WORDS))
        assert ledger.commit(plan, ids(*context), made, reply) == number
        steps.append(Step([*messages, reply], prompt, generated))
        session.items.append([{"turn": number}])
    verify(session, steps)


def verify(session: Session, steps: list[Step]) -> None:
    segments = session.ledger.segments()
    trained = 0
    seen: set[int] = set()
    for segment in segments:
        leaf = steps[segment.path[-1]]
        assert segment.token_ids.tolist() == leaf.prompt + leaf.generated
        mask = np.zeros(len(segment.token_ids), bool)
        for turn, record in zip(segment.path, segment.turns, strict=True):
            assert record.start == len(steps[turn].prompt)
            assert segment.token_ids[record.start : record.end].tolist() == steps[turn].generated
            mask[record.start : record.end] = turn not in seen
        assert (segment.loss_mask == mask).all()
        root = segment.path[0]
        asked = steps[root].messages[:-1] in [step.messages[:-1] for step in steps[:root]]
        branch = segment.reason is SegmentReason.BRANCH
        assert branch or root not in seen
        assert not branch or root in seen or asked
        seen.update(segment.path)
        trained += int(segment.loss_mask.sum())
    assert seen == set(range(len(steps)))
    assert trained == sum(len(step.generated) for step in steps)
    if segments:
        assert segments[0].path[0] == 0
        assert segments[0].reason is SegmentReason.START
    made = rows(session, Outcome(), "run", 0)
    for row in made:
        check(row)
    masks = sum(int(row.loss_mask.sum()) for row in made)
    assert masks + sum(row.tokens_excluded for row in made) == trained
