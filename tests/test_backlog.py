"""The backlog: at least once, nothing lost, groups whole, oldest first."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollout_workers.backlog import Backlog, Entry, check_take
from rollout_workers.errors import BadRequest, Conflict


def entry(name: str, group: str | None = None, size: int | None = None) -> Entry[str]:
    return Entry(trajectory_id=name, group_id=group, group_size=size, rows=1, place=name)


def names(entries: Any) -> list[str]:
    return [e.trajectory_id for e in entries]


def filled(*entries: Entry[str]) -> Backlog[str]:
    backlog: Backlog[str] = Backlog(lease_s=10)
    backlog.add(entries)
    return backlog


def test_oldest_first() -> None:
    backlog = filled(entry("a"), entry("b"), entry("c"))
    assert names(backlog.ready(2, None)) == ["a", "b"]
    assert names(backlog.ready(9, None)) == ["a", "b", "c"]
    assert backlog.waiting == 3  # asking takes nothing


def test_lease_ack() -> None:
    backlog = filled(entry("a"), entry("b"))
    lease = backlog.lease(backlog.ready(1, None), "trainer", now=100)
    assert (lease.consumer, lease.ends, names(lease.entries)) == ("trainer", 110, ["a"])
    assert (backlog.waiting, backlog.leased, backlog.acked) == (1, 1, 0)
    assert backlog.ack(lease.id) == 1
    assert (backlog.waiting, backlog.leased, backlog.acked) == (1, 0, 1)
    assert backlog.ack(lease.id) == 0
    assert backlog.acked == 1


def test_nack_offers_again_in_the_old_place() -> None:
    backlog = filled(entry("a"), entry("b"), entry("c"))
    lease = backlog.lease(backlog.ready(2, None), "t", 0)
    assert names(backlog.ready(9, None)) == ["c"]
    assert backlog.nack(lease.id) == 2
    assert names(backlog.ready(9, None)) == ["a", "b", "c"]
    with pytest.raises(Conflict):
        backlog.ack(lease.id)


def test_expiry() -> None:
    backlog = filled(entry("a"), entry("b"))
    first = backlog.lease(backlog.ready(1, None), "t", 0)
    second = backlog.lease(backlog.ready(1, None), "t", 5)
    assert backlog.next_end() == 10
    assert backlog.expire(9.9) == []
    assert backlog.expire(10) == [first]
    assert names(backlog.ready(9, None)) == ["a"]
    assert backlog.next_end() == 15
    with pytest.raises(Conflict, match="offered again"):
        backlog.ack(first.id)
    assert backlog.ack(second.id) == 1
    assert backlog.next_end() is None


@pytest.mark.parametrize("lease_id", [0, 99, -1])
def test_unknown_lease(lease_id: int) -> None:
    backlog = filled(entry("a"))
    with pytest.raises(Conflict) as caught:
        backlog.ack(lease_id)
    assert caught.value.param == "lease"
    with pytest.raises(Conflict):
        backlog.nack(lease_id)


def test_an_empty_take_may_be_acknowledged() -> None:
    """A loop that acks whatever it got need not look whether that was anything."""
    backlog = filled()
    for end in (backlog.ack, backlog.nack):
        lease = backlog.lease(backlog.ready(1, None), "t", 0)
        assert end(lease.id) == 0
    assert backlog.next_end() is None


def test_whole_groups_in_the_order_of_their_completion() -> None:
    backlog = filled(
        entry("a1", "a", 2),
        entry("b1", "b", 2),
        entry("lone"),
        entry("open", "c", None),
        entry("b2", "b", 2),
        entry("a2", "a", 2),
        entry("d1", "d", 2),
    )
    assert names(backlog.ready(None, 9)) == ["b1", "b2", "a1", "a2"]
    assert names(backlog.ready(None, 1)) == ["b1", "b2"]
    lease = backlog.lease(backlog.ready(None, 1), "t", 0)
    assert names(backlog.ready(None, 9)) == ["a1", "a2"]
    backlog.nack(lease.id)
    assert names(backlog.ready(None, 9)) == ["b1", "b2", "a1", "a2"]
    backlog.add([entry("d2", "d", 2)])
    assert names(backlog.ready(None, 3))[-2:] == ["d1", "d2"]


def test_a_tombstone_completes_its_group() -> None:
    backlog = filled(entry("a1", "a", 2))
    assert backlog.ready(None, 1) == []
    backlog.add([entry("tombstone", "a", 2)])
    assert names(backlog.ready(None, 1)) == ["a1", "tombstone"]


def test_a_group_id_used_again_is_another_group() -> None:
    backlog = filled(*(entry(f"e{i}", "g", 2) for i in range(5)))
    assert names(backlog.ready(None, 1)) == ["e0", "e1"]
    assert names(backlog.ready(None, 9)) == ["e0", "e1", "e2", "e3"]
    assert backlog.incomplete_groups == 1
    backlog.add([entry("e5", "g", 2), entry("f", "h", 2)])
    assert backlog.incomplete_groups == 1


def test_what_was_seen_is_known_for_good() -> None:
    backlog = filled(entry("a"))
    assert backlog.knows("a")
    assert not backlog.knows("b")
    backlog.ack(backlog.lease(backlog.ready(1, None), "t", 0).id)
    assert backlog.knows("a")


@pytest.mark.parametrize(
    ("n", "groups", "param"),
    [
        (None, None, "n"),
        (1, 1, "n"),
        (0, None, "n"),
        (-1, None, "n"),
        (1.0, None, "n"),
        ("1", None, "n"),
        (True, None, "n"),
        (None, 0, "groups"),
        (None, "1", "groups"),
    ],
)
def test_wrong_take(n: Any, groups: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_take(n, groups)
    assert caught.value.param == param


def test_right_take() -> None:
    check_take(1, None)
    check_take(None, 3)


class Deliveries(RuleBasedStateMachine):
    """Trajectories arrive, are taken by one or by group, and leases end in every way."""

    GROUPS: ClassVar = {"g": 2, "h": 3}

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.backlog: Backlog[str] = Backlog(lease_s=5)
        self.added: list[str] = []
        self.group_of: dict[str, str | None] = {}
        self.acked: set[str] = set()
        self.leases: dict[int, tuple[float, list[str]]] = {}
        self.ended: set[int] = set()

    @rule(group=st.sampled_from([None, "g", "h"]))
    def add(self, group: str | None) -> None:
        name = f"t{len(self.added)}"
        # Groups fill up one after the other, as sessions of one task do.
        number = sum(1 for g in self.group_of.values() if g and g.startswith(f"{group}."))
        size = self.GROUPS.get(group or "")
        named = None if group is None or size is None else f"{group}.{number // size}"
        assert not self.backlog.knows(name)
        self.backlog.add([entry(name, named, size)])
        assert self.backlog.knows(name)
        self.added.append(name)
        self.group_of[name] = named

    def taken(self, entries: list[Entry[str]]) -> None:
        lease = self.backlog.lease(entries, "t", self.now)
        assert lease.id not in self.leases
        assert lease.id not in self.ended
        if entries:
            self.leases[lease.id] = (self.now + 5, names(entries))

    @rule(n=st.integers(1, 4))
    def take(self, n: int) -> None:
        ready = self.backlog.ready(n, None)
        assert names(ready) == self.waiting()[:n]
        self.taken(ready)

    @rule(groups=st.integers(1, 2))
    def take_groups(self, groups: int) -> None:
        ready = self.backlog.ready(None, groups)
        got = [self.group_of[name] for name in names(ready)]
        assert len(set(got)) <= groups
        for group in set(got):
            assert group is not None
            assert got.count(group) == self.GROUPS[group.partition(".")[0]]
        self.taken(ready)

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([0, *self.leases, *sorted(self.ended)]))
        if lease_id in self.leases:
            assert self.backlog.ack(lease_id) == len(self.leases[lease_id][1])
            self.acked.update(self.leases.pop(lease_id)[1])
        else:
            with pytest.raises(Conflict):
                self.backlog.ack(lease_id)

    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from([0, *self.leases]))
        if lease_id:
            assert self.backlog.nack(lease_id) == len(self.leases.pop(lease_id)[1])
            self.ended.add(lease_id)

    @rule(seconds=st.integers(0, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        due = {i for i, (ends, _) in self.leases.items() if ends <= self.now}
        assert {lease.id for lease in self.backlog.expire(self.now)} == due
        for lease_id in due:
            del self.leases[lease_id]
        self.ended |= due

    def waiting(self) -> list[str]:
        held = {name for _, taken in self.leases.values() for name in taken}
        return [name for name in self.added if name not in held | self.acked]

    @invariant()
    def every_trajectory_is_in_one_place(self) -> None:
        assert names(self.backlog.ready(1000, None)) == self.waiting()
        assert self.backlog.waiting == len(self.waiting())
        assert self.backlog.leased == sum(len(taken) for _, taken in self.leases.values())
        assert self.backlog.acked == len(self.acked)
        ends = [ends for ends, _ in self.leases.values()]
        assert self.backlog.next_end() == min(ends, default=None)


def test_nothing_is_lost_whatever_happens() -> None:
    run_state_machine_as_test(Deliveries, settings=settings(deadline=None, stateful_step_count=40))
