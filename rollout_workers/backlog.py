"""Which finished trajectories are waiting, leased or done. Pure: time comes from the caller.

Delivery is at least once: what is leased and not acknowledged before its lease ends is offered
again, oldest first, with the same row ids.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollout_workers.errors import BadRequest, Conflict

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[Place]):
    """One trajectory: ``place`` is where its rows lie, ``rows`` how many segments it has."""

    trajectory_id: str
    group_id: str | None
    group_size: int | None
    rows: int
    place: Place


@dataclass(frozen=True, slots=True)
class Lease(Generic[Place]):
    """What one ``take`` handed out, until ``ends`` (seconds on the caller's clock)."""

    id: int
    consumer: str
    ends: float
    entries: tuple[Entry[Place], ...]


@dataclass(slots=True)
class Backlog(Generic[Place]):
    """Owns the order of trajectories, the groups they complete, and the leases on them."""

    lease_s: float
    acked: int = 0
    _seen: set[str] = field(default_factory=set)
    _waiting: dict[int, Entry[Place]] = field(default_factory=dict)  # by arrival, oldest first
    _arrival: dict[str, int] = field(default_factory=dict)
    _leases: dict[int, Lease[Place]] = field(default_factory=dict)
    _done: dict[int, None] = field(default_factory=dict)  # leases that were acknowledged
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def waiting(self) -> int:
        """Trajectories that a take may get now."""
        return len(self._waiting)

    @property
    def leased(self) -> int:
        """Trajectories handed out and not acknowledged."""
        return sum(len(lease.entries) for lease in self._leases.values())

    @property
    def incomplete_groups(self) -> int:
        """Groups of which some members wait, but not all."""
        sizes = {e.group_id: e.group_size for e in self._waiting.values() if e.group_size}
        members = Counter(e.group_id for e in self._waiting.values())
        return sum(members[group] % size != 0 for group, size in sizes.items())

    def knows(self, trajectory_id: str) -> bool:
        """Whether this trajectory ever arrived; a second arrival is a repeated delivery."""
        return trajectory_id in self._seen

    def add(self, entries: Iterable[Entry[Place]]) -> None:
        """Add trajectories in order of arrival."""
        for entry in entries:
            self._seen.add(entry.trajectory_id)
            number = self._arrival.setdefault(entry.trajectory_id, len(self._arrival))
            self._waiting[number] = entry

    def ready(self, n: int | None, groups: int | None) -> list[Entry[Place]]:
        """Up to ``n`` trajectories, or all of up to ``groups`` complete groups, oldest first."""
        ordered = [self._waiting[number] for number in sorted(self._waiting)]
        if n is not None:
            return ordered[:n]
        return list(itertools.chain(*itertools.islice(_complete(ordered), groups)))

    def lease(self, entries: Iterable[Entry[Place]], consumer: str, now: float) -> Lease[Place]:
        """Hand out entries that ``ready`` gave."""
        lease = Lease(next(self._ids), consumer, now + self.lease_s, tuple(entries))
        for entry in lease.entries:
            del self._waiting[self._arrival[entry.trajectory_id]]
        if lease.entries:
            self._leases[lease.id] = lease
        else:
            self._note_done(lease.id)  # ending it is harmless
        return lease

    def ack(self, lease_id: int) -> int:
        """End a lease for good; returns how many trajectories that were. Repeating it is harmless.

        Raises:
            Conflict: the lease ended before and its trajectories were offered again.
        """
        if lease_id in self._done:
            return 0
        lease = self._end(lease_id)
        self._note_done(lease_id)
        self.acked += len(lease.entries)
        return len(lease.entries)

    def nack(self, lease_id: int) -> int:
        """Offer the trajectories of a lease again; returns how many: none after its ``ack``.

        Raises:
            Conflict: the lease ended before and its trajectories were offered again.
        """
        if lease_id in self._done:
            return 0
        lease = self._end(lease_id)
        self.add(lease.entries)
        return len(lease.entries)

    def expire(self, now: float) -> list[Lease[Place]]:
        """Offer again what was leased longer ago than the lease time."""
        ended = [lease for lease in self._leases.values() if lease.ends <= now]
        for lease in ended:
            self.nack(lease.id)
        return ended

    def next_end(self) -> float | None:
        """When the earliest lease ends."""
        return min((lease.ends for lease in self._leases.values()), default=None)

    def _note_done(self, lease_id: int) -> None:
        self._done[lease_id] = None
        if len(self._done) > 10_000:
            del self._done[next(iter(self._done))]

    def _end(self, lease_id: int) -> Lease[Place]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise Conflict(
                f"lease {lease_id} is not held: it ended and its rows were offered again", "lease"
            )
        return lease


def check_take(n: int | None, groups: int | None) -> None:
    """Raise ``BadRequest`` unless exactly one of the two is a whole number above 0."""
    given = {"n": n, "groups": groups}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) != 1:
        raise BadRequest("take wants either n trajectories or groups, not both or neither", "n")
    for name, value in asked.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{name} must be a whole number above 0, got {value!r:.40}", name)


def _complete(ordered: list[Entry[Place]]) -> Iterable[list[Entry[Place]]]:
    """Complete groups, in the order in which they became complete."""
    members: dict[str, list[Entry[Place]]] = {}
    for entry in ordered:
        if entry.group_id is None or entry.group_size is None:
            continue
        group = members.setdefault(entry.group_id, [])
        group.append(entry)
        if len(group) == entry.group_size:
            yield members.pop(entry.group_id)
