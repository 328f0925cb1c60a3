"""Which worker serves a session: the roster as routers see it, and the choice.

Pure: it holds counts and decides; the caller does the I/O. A session stays with its worker for the
prefix cache; a new one goes to the worker with the fewest tokens in flight, ties at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rollout_workers.errors import PoolNotReady


class WorkerState(StrEnum):
    """Where a worker slot is in its life."""

    STARTING = "starting"  # the engine is loading
    SERVING = "serving"  # takes new turns
    DOWN = "down"  # lost or failed; see its reason
    STOPPED = "stopped"  # retired on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One engine as its worker publishes it.

    ``api_key`` opens inference and ``admin_key`` control calls of the engine at ``url``.
    """

    name: str
    url: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    version: int
    vocab_size: int
    context_length: int  # prompt + generated tokens, in tokens
    max_prompt_tokens: int
    max_total_tokens: int  # KV pool size, in tokens
    node_id: str
    pid: int
    started_at: float  # unix seconds
    log_path: str


class RouteReason(StrEnum):
    """Why a turn went where it went."""

    STICKY = "sticky"  # the session's own worker serves
    NEW = "new"  # first turn of the session
    PINNED_LOST = "pinned_lost"  # the session's worker no longer serves


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision: load is already reserved and must be released."""

    worker: WorkerInfo
    reason: RouteReason
    tokens: int


@dataclass(slots=True)
class _Load:
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Roster:
    """Owns one router's view of the workers, its own load on them, and the pins of sessions."""

    rng: random.Random = field(default_factory=random.Random)
    reasons: Counter[RouteReason] = field(default_factory=Counter)
    _serving: dict[str, WorkerInfo] = field(default_factory=dict)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _pins: dict[str, str] = field(default_factory=dict)

    @property
    def serving(self) -> list[WorkerInfo]:
        """The workers that take turns now."""
        return list(self._serving.values())

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """Replace the serving set; load of turns still running is kept until released."""
        self._serving = {worker.name: worker for worker in workers}
        for name in self._serving:
            self._loads.setdefault(name, _Load())
        for name in [
            n for n, load in self._loads.items() if n not in self._serving and not load.requests
        ]:
            del self._loads[name]

    def choose(self, session_id: str, tokens: int) -> Choice:
        """Pick a worker for a turn of about ``tokens`` tokens and reserve that load in one step.

        Raises:
            PoolNotReady: no worker serves.
        """
        if not self._serving:
            raise PoolNotReady("no worker serves now; `rollout-workers status` says why")
        pinned = self._pins.get(session_id)
        if pinned in self._serving:
            return self._reserve(session_id, pinned, RouteReason.STICKY, tokens)
        reason = RouteReason.NEW if pinned is None else RouteReason.PINNED_LOST
        return self._reserve(session_id, self._least_loaded(), reason, tokens)

    def release(self, choice: Choice) -> None:
        """Give back the load that ``choose`` reserved."""
        load = self._loads[choice.worker.name]
        load.requests -= 1
        load.tokens -= choice.tokens

    def forget(self, session_id: str) -> None:
        """Drop the pin of a session that ended."""
        self._pins.pop(session_id, None)

    def load(self, name: str) -> dict[str, int]:
        """This router's requests, tokens and pinned sessions on one worker."""
        load = self._loads.get(name, _Load())
        pinned = sum(1 for pin in self._pins.values() if pin == name)
        return {"requests": load.requests, "tokens": load.tokens, "sessions": pinned}

    def _least_loaded(self) -> str:
        least = min(self._loads[name].tokens for name in self._serving)
        return self.rng.choice([n for n in self._serving if self._loads[n].tokens == least])

    def _reserve(self, session_id: str, name: str, reason: RouteReason, tokens: int) -> Choice:
        self._pins[session_id] = name
        load = self._loads[name]
        load.requests += 1
        load.tokens += tokens
        self.reasons[reason] += 1
        return Choice(self._serving[name], reason, tokens)
