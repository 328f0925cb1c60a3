"""Open sessions, and how a finished one becomes rows. Pure: the caller brings time and does I/O.

One session is one conversation of one agent with the policy and becomes one trajectory. A session
is *declared* when it was opened or belongs to a group; only declared ones leave a row when they
expire. An *ephemeral* one was never named by its caller and leaves a row only if it is finished.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_workers.errors import BadRequest, Conflict, NotFound
from rollout_workers.ledger import EMPTY_SEGMENT, Ledger, Segment, SegmentReason
from rollout_workers.outcome import Declaration, Outcome, check_identifier
from rollout_workers.reply import items_json
from rollout_workers.schema import Row, row_id

Json = dict[str, Any]
_GROUPS_KEPT = 100_000  # group sizes that are remembered


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session. ``items[i]`` are the Responses items that turn ``i`` added."""

    id: str
    touched: float
    declared: bool
    ephemeral: bool = False
    declaration: Declaration = field(default_factory=Declaration)
    trajectory_id: str = field(default_factory=lambda: f"traj_{uuid.uuid4().hex}")
    ledger: Ledger = field(default_factory=Ledger)
    items: list[list[Json]] = field(default_factory=list)
    responses: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0  # turns being sampled
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever none is
    outcome: Outcome | None = None  # set when finishing begins: no new turn starts
    result: Json | None = None  # set when its rows are stored


@dataclass(slots=True)
class Sessions:
    """Owns all sessions of a router shard, least recently used first."""

    ttl_s: float
    ephemeral_ttl_s: float = 60.0
    _named: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _ephemeral: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _group_sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._named) + len(self._ephemeral)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._named or session_id in self._ephemeral

    def open(
        self,
        session_id: str,
        now: float,
        declaration: Declaration | None,
        *,
        declare: bool = False,
        ephemeral: bool = False,
    ) -> Session:
        """Find or open a session and merge what the caller declared.

        A group's size is that of its first declaration; later ones may leave it out.

        Raises:
            BadRequest: a malformed id, or a group without a size.
            Conflict: the session is finished, or was declared otherwise before.
        """
        check_identifier(session_id, "session_id")
        session = self._find(session_id)
        if session is None:
            session = Session(id=session_id, touched=now, declared=False, ephemeral=ephemeral)
        elif session.outcome is not None:
            raise Conflict(f"session {session_id} is finished; use a new session id", "session_id")
        if declaration is not None:
            session.declaration = self._sized(session.declaration.merge(declaration))
            session.declared |= declare or session.declaration.group_id is not None
        self._order(session)[session_id] = session
        self.touch(session, now)
        return session

    def get(self, session_id: str) -> Session:
        """A known session, open or finished.

        Raises:
            NotFound: there is none by that id.
        """
        session = self._find(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise NotFound(f"no session {session_id!r:.140}; it may have expired", "session_id")
        return session

    def touch(self, session: Session, now: float) -> None:
        """Count a use, so that the session does not expire soon."""
        session.touched = now
        self._order(session).move_to_end(session.id)

    def settle(self, session: Session, now: float) -> None:
        """Note that a turn ended; an ephemeral session without any turn has nothing to keep."""
        self.touch(session, now)
        if session.in_flight:
            return
        session.idle.set()
        session.idle = asyncio.Event()
        if session.ephemeral and not session.ledger.turns and session.outcome is None:
            self.drop(session)

    def begin_finish(self, session: Session, outcome: Outcome) -> None:
        """Close a session to new turns; the very same outcome again changes nothing.

        Raises:
            Conflict: it was finished otherwise.
            BadRequest: the outcome does not fit the session.
        """
        if session.outcome is not None:
            if session.outcome != outcome:
                raise Conflict(f"session {session.id} is finished with another outcome", "reward")
            return
        if outcome.response_id and outcome.response_id not in session.responses:
            raise BadRequest(f"{outcome.response_id} is not of this session", "response_id")
        session.outcome = outcome

    def end_finish(self, session: Session, result: Json) -> None:
        """Keep only what answers a repeated finish."""
        session.result = result
        session.ledger, session.items, session.responses = Ledger(), [], {}

    def drop(self, session: Session) -> None:
        """Forget a session."""
        self._order(session).pop(session.id, None)

    def expired(self, now: float, limit: int = 64) -> list[Session]:
        """Up to ``limit`` sessions that were idle beyond their TTL; finished ones are dropped here.

        The caller drops, finishes or touches each of them; called again, it gives the next ones.
        """
        found: dict[str, Session] = {}
        for order in (self._named, self._ephemeral):
            while order and len(found) < limit:
                head = next(iter(order.values()))
                if head.id in found or now - head.touched < self._ttl(head):
                    break
                if head.in_flight:
                    self.touch(head, now)
                elif head.result is not None:
                    self.drop(head)
                else:
                    found[head.id] = head
                    order.move_to_end(head.id)
        return list(found.values())

    def is_idle(self, session: Session, now: float) -> bool:
        """Whether a session has no turn running and was not used for its TTL."""
        return not session.in_flight and now - session.touched >= self._ttl(session)

    def _ttl(self, session: Session) -> float:
        return min(self.ttl_s, self.ephemeral_ttl_s) if session.ephemeral else self.ttl_s

    def _order(self, session: Session) -> OrderedDict[str, Session]:
        return self._ephemeral if session.ephemeral else self._named

    def _find(self, session_id: str) -> Session | None:
        return self._named.get(session_id) or self._ephemeral.get(session_id)

    def _sized(self, declaration: Declaration) -> Declaration:
        """The declaration with its group's size, which is the same for all of the group."""
        group, size = declaration.group_id, declaration.group_size
        if group is None:
            return declaration
        known = self._group_sizes.get(group)
        if known is None and size is None:
            raise BadRequest("a group's first session must declare its group_size", "group_size")
        if known is not None and size is not None and known != size:
            raise Conflict(f"group {group} has size {known}, not {size}", "group_size")
        self._group_sizes[group] = known or size or 0
        self._group_sizes.move_to_end(group)
        if len(self._group_sizes) > _GROUPS_KEPT:
            self._group_sizes.popitem(last=False)
        return replace(declaration, group_size=self._group_sizes[group])


def rows(session: Session, outcome: Outcome, run_id: str, version: int) -> list[Row]:
    """One row per segment; a session that never generated leaves one row without tokens.

    Evaluation sessions (``record`` false) have none. ``version`` is the current weight version.

    Raises:
        BadRequest: there is not one turn reward per turn.
    """
    ledger = session.ledger
    final = session.responses.get(outcome.response_id or "")
    excluded = ledger.excluded(final)
    turns = len(ledger.turns) - len(excluded)
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != turns:
        raise BadRequest(
            f"{len(outcome.turn_rewards)} turn_rewards for {turns} turns", "turn_rewards"
        )
    if not session.declaration.record:
        return []
    segments = ledger.segments(excluded) or [EMPTY_SEGMENT]
    made = [
        _row(session, outcome, run_id, version, segment, number, len(segments))
        for number, segment in enumerate(segments)
    ]
    if excluded:
        made[0] = _with_excluded(made[0], sum(len(ledger.turns[i].sampled.ids) for i in excluded))
    return made


def _with_excluded(row: Row, tokens: int) -> Row:
    """The trunk's row with the count of all sampled tokens that are trained in no row."""
    if row.turns:
        return replace(row, tokens_excluded=tokens)
    why = "several answers to one request, and finish named none of them"
    return replace(
        row,
        tokens_excluded=tokens,
        segment_reason=SegmentReason.AMBIGUOUS,
        error=row.error or why,
    )


def _row(
    session: Session,
    outcome: Outcome,
    run_id: str,
    version: int,
    segment: Segment,
    number: int,
    count: int,
) -> Row:
    seen = [span.version for span in segment.spans] or [version]
    return Row(
        trajectory_id=session.trajectory_id,
        session_id=session.id,
        group_id=session.declaration.group_id,
        segment=number,
        num_segments=count,
        group_size=session.declaration.group_size,
        prompt_length=segment.turns[0].start if segment.turns else 0,
        token_ids=segment.token_ids,
        loss_mask=segment.loss_mask,
        logprobs=segment.logprobs,
        versions=segment.spans,
        min_version=min(seen),
        max_version=max(seen),
        turns=segment.turns,
        reward=outcome.reward,
        turn_rewards=outcome.turn_rewards,
        tokens_masked_elsewhere=segment.masked_elsewhere,
        status=_status(outcome, segment),
        segment_reason=segment.reason,
        error=outcome.error,
        run_id=run_id,
        items=items_json([item for i in segment.path for item in session.items[i]]),
        metadata=outcome.metadata,
    )


def result(session: Session, stored: Sequence[Row]) -> Json:
    """What ``finish`` answers."""
    return {
        "session_id": session.id,
        "trajectory_id": session.trajectory_id,
        "row_ids": [row_id(row.trajectory_id, row.segment) for row in stored],
        "turns": len(session.ledger.turns),
        "tokens": sum(len(row.token_ids) for row in stored),
        "status": stored[0].status if stored else "not_recorded",
    }


def _status(outcome: Outcome, segment: Segment) -> str:
    if outcome.status is not None:
        return outcome.status
    if not segment.turns or outcome.error is not None:
        return "error"
    return "length" if segment.turns[-1].finish_reason == "length" else "completed"
