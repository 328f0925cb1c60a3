"""Open sessions, and how a finished one becomes rows. Pure: the caller brings time and does I/O.

One session is one conversation of one agent with the policy and becomes one trajectory. A session
is *declared* when it was opened or belongs to a group; only declared ones leave a row when they
expire. An *ephemeral* one was never named by its caller and leaves a row only if it is finished.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_workers.errors import BadRequest, Conflict, NotFound
from rollout_workers.ledger import EMPTY_SEGMENT, Ledger, Segment
from rollout_workers.outcome import Declaration, Outcome, check_identifier
from rollout_workers.reply import items_json
from rollout_workers.schema import Row, row_id

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session. ``items[i]`` are the Responses items that turn ``i`` added."""

    id: str
    touched: float
    declared: bool
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
    _open: OrderedDict[str, Session] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._open

    def open(
        self, session_id: str, now: float, declaration: Declaration | None, declare: bool = False
    ) -> Session:
        """Find or open a session and merge what the caller declared.

        Raises:
            BadRequest: a malformed id.
            Conflict: the session is finished, or was declared otherwise before.
        """
        check_identifier(session_id, "session_id")
        session = self._open.get(session_id)
        if session is None:
            session = Session(id=session_id, touched=now, declared=False)
        elif session.outcome is not None:
            raise Conflict(f"session {session_id} is finished; use a new session id", "session_id")
        if declaration is not None:
            session.declaration = session.declaration.merge(declaration)
            session.declared |= declare or session.declaration.group_id is not None
        self._open[session_id] = session
        self.touch(session, now)
        return session

    def get(self, session_id: str) -> Session:
        """A known session, open or finished.

        Raises:
            NotFound: there is none by that id.
        """
        session = self._open.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise NotFound(f"no session {session_id!r:.140}; it may have expired", "session_id")
        return session

    def touch(self, session: Session, now: float) -> None:
        """Count a use, so that the session does not expire soon."""
        session.touched = now
        self._open.move_to_end(session.id)

    def settle(self, session: Session, now: float, *, ephemeral: bool) -> None:
        """Note that a turn ended; an ephemeral session without any turn has nothing to keep."""
        self.touch(session, now)
        if session.in_flight:
            return
        session.idle.set()
        session.idle = asyncio.Event()
        if ephemeral and not session.ledger.turns and session.outcome is None:
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
        self._open.pop(session.id, None)

    def expired(self, now: float, limit: int = 64) -> list[Session]:
        """Up to ``limit`` sessions that were idle beyond the TTL; finished ones go here."""
        idle = [s for s in itertools.islice(self._open.values(), limit) if self.is_idle(s, now)]
        for session in idle:
            if session.result is not None:
                self.drop(session)
        return [session for session in idle if session.result is None]

    def is_idle(self, session: Session, now: float) -> bool:
        """Whether a session has no turn running and was not used for the TTL."""
        return not session.in_flight and now - session.touched >= self.ttl_s


def rows(session: Session, outcome: Outcome, run_id: str, version: int) -> list[Row]:
    """One row per segment; a session that never generated leaves one row without tokens.

    Evaluation sessions (``record`` false) have none. ``version`` is the current weight version.

    Raises:
        BadRequest: there is not one turn reward per turn.
    """
    turns = len(session.ledger.turns)
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != turns:
        raise BadRequest(
            f"{len(outcome.turn_rewards)} turn_rewards for {turns} turns", "turn_rewards"
        )
    if not session.declaration.record:
        return []
    segments = session.ledger.segments() or [EMPTY_SEGMENT]
    return [
        _row(session, outcome, run_id, version, segment, number, len(segments))
        for number, segment in enumerate(segments)
    ]


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
    if not segment.turns:
        return "error"
    return "length" if segment.turns[-1].finish_reason == "length" else "completed"
