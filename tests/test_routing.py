"""Which worker serves: sessions stay, new ones go where there is room, and load comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)
from local import worker

from rollout_workers.errors import PoolNotReady
from rollout_workers.routing import Choice, Roster, RouteReason

WORKERS = [worker("http://127.0.0.1:1", f"w{i}") for i in range(4)]
NAMES = [w.name for w in WORKERS]


def roster(count: int = 4, seed: int = 0) -> Roster:
    made = Roster(rng=random.Random(seed))
    made.update(WORKERS[:count])
    return made


def test_no_worker() -> None:
    with pytest.raises(PoolNotReady) as caught:
        Roster().choose("s", 1)
    assert caught.value.retryable
    assert caught.value.status == 503


def test_keys_do_not_show() -> None:
    shown = repr(worker("http://h:1", api_key="hidden-1", admin_key="hidden-2"))
    assert "hidden" not in shown and "http://h:1" in shown


def test_sessions_spread_and_stay() -> None:
    """200 sessions with one shared prompt, 5 turns each, interleaved."""
    pool = roster()
    homes: dict[str, set[str]] = {}
    for turn in range(5):
        choices = []
        for number in range(1, 201):
            choice = pool.choose(f"session-{number}", 500 + turn)
            homes.setdefault(f"session-{number}", set()).add(choice.worker.name)
            choices.append(choice)
        for choice in choices:
            pool.release(choice)
    assert all(len(home) == 1 for home in homes.values())
    counts = Counter(next(iter(home)) for home in homes.values())
    assert max(counts.values()) <= 1.5 * 200 / 4
    assert pool.reasons == {RouteReason.NEW: 200, RouteReason.STICKY: 800}


def test_affinity_is_by_the_whole_id() -> None:
    pool = roster(2)
    first = pool.choose("session-1", 100)
    second = pool.choose("session-12", 1)
    assert first.worker.name != second.worker.name


def test_new_sessions_go_to_the_least_loaded() -> None:
    pool = roster(3)
    taken = [pool.choose(f"s{i}", 100).worker.name for i in range(3)]
    assert sorted(taken) == NAMES[:3]
    light = pool.choose("light", 10).worker.name
    heavy = pool.choose("heavy", 1000).worker.name
    assert heavy != light
    assert pool.choose("next", 1).worker.name not in (heavy, light)


def test_tokens_count_not_requests() -> None:
    pool = roster(2)
    busy = pool.choose("long", 1000).worker.name
    others = {pool.choose(f"s{i}", 1).worker.name for i in range(50)}
    assert busy not in others


def test_ties_are_broken_at_random() -> None:
    seen = {roster(seed=seed).choose("s", 1).worker.name for seed in range(40)}
    assert seen == set(NAMES)


def test_pinned_worker_lost() -> None:
    pool = roster(2)
    choice = pool.choose("s", 10)
    left = [w for w in WORKERS[:2] if w.name != choice.worker.name]
    pool.update(left)
    moved = pool.choose("s", 10)
    assert (moved.worker.name, moved.reason) == (left[0].name, RouteReason.PINNED_LOST)
    pool.release(choice)  # the turn that was running there
    pool.update(WORKERS[:2])
    assert pool.choose("s", 10).worker.name == left[0].name  # it stays where it went
    assert pool.load(choice.worker.name) == {"requests": 0, "tokens": 0, "sessions": 0}


def test_load_survives_removal_and_return() -> None:
    pool = roster(1)
    choice = pool.choose("s", 10)
    pool.update([])
    assert pool.serving == []
    pool.update(WORKERS[:1])
    assert pool.load("w0") == {"requests": 1, "tokens": 10, "sessions": 1}
    pool.update([])
    pool.release(choice)
    pool.update(WORKERS[:1])
    assert pool.load("w0") == {"requests": 0, "tokens": 0, "sessions": 1}


def test_a_restarted_worker_is_used_at_its_new_address() -> None:
    pool = roster(1)
    pool.release(pool.choose("s", 1))
    pool.update([worker("http://127.0.0.1:2", "w0")])
    assert pool.choose("s", 1).worker.url == "http://127.0.0.1:2"


def test_forgotten_sessions_are_new_again() -> None:
    pool = roster(2)
    pool.release(pool.choose("s", 1))
    assert sum(pool.load(name)["sessions"] for name in NAMES) == 1
    pool.forget("s")
    pool.forget("never seen")
    assert sum(pool.load(name)["sessions"] for name in NAMES) == 0
    assert pool.choose("s", 1).reason is RouteReason.NEW


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_no_worker_is_ahead_by_more_than_one_turn(sizes: list[int]) -> None:
    pool = roster()
    for number, tokens in enumerate(sizes):
        pool.choose(f"s{number}", tokens)
    loads = [pool.load(name)["tokens"] for name in NAMES]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


class Loads(RuleBasedStateMachine):
    """Turns that begin and end while workers come and go."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Roster(rng=random.Random(0))
        self.open: list[Choice] = []
        self.up: set[str] = set()
        self.pins: dict[str, str] = {}

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def update(self, names: set[str]) -> None:
        self.up = names
        self.pool.update([w for w in WORKERS if w.name in names])

    @rule(target=running, session=st.sampled_from("abcde"), tokens=st.integers(0, 100))
    def choose(self, session: str, tokens: int) -> Choice | None:
        if not self.up:
            with pytest.raises(PoolNotReady):
                self.pool.choose(session, tokens)
            return None
        choice = self.pool.choose(session, tokens)
        assert choice.worker.name in self.up
        if self.pins.get(session) in self.up:
            assert choice.worker.name == self.pins[session]
            assert choice.reason is RouteReason.STICKY
        self.pins[session] = choice.worker.name
        self.open.append(choice)
        return choice

    @rule(choice=consumes(running))
    def release(self, choice: Choice | None) -> None:
        if choice is not None:
            self.pool.release(choice)
            self.open.remove(choice)

    @rule(session=st.sampled_from("abcde"))
    def forget(self, session: str) -> None:
        self.pool.forget(session)
        self.pins.pop(session, None)

    @invariant()
    def loads_are_those_of_the_running_turns(self) -> None:
        for name in NAMES:
            mine = [choice.tokens for choice in self.open if choice.worker.name == name]
            load = self.pool.load(name)
            assert (load["requests"], load["tokens"]) == (len(mine), sum(mine))


def test_load_is_exact_whatever_happens() -> None:
    run_state_machine_as_test(Loads, settings=settings(deadline=None, stateful_step_count=30))
