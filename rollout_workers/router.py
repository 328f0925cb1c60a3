"""The router actor: one shard of open sessions, from a request to its rows.

`turns.py` has the walk of one request, `outbox.py` the way of finished rows to the buffer,
`http.py` the front door in the same event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from aiohttp import web

from rollout_workers import models
from rollout_workers import sessions as session_rules
from rollout_workers.config import PoolConfig
from rollout_workers.errors import BadRequest, NotFound, PoolNotReady, RolloutError, StartFailed
from rollout_workers.http import serve
from rollout_workers.identity import session_name, session_of
from rollout_workers.outbox import Outbox
from rollout_workers.outcome import Declaration, Outcome
from rollout_workers.responses import parse
from rollout_workers.routing import Roster, WorkerInfo
from rollout_workers.schema import row_schema, to_ipc
from rollout_workers.sessions import Session, Sessions
from rollout_workers.template import ChatTemplate
from rollout_workers.turns import Turns

Json = dict[str, Any]
_GC_THRESHOLDS = 50_000, 20, 20  # Python's first is 700, passed by every reply
_EXPIRY_S = 1.0  # between looks for idle sessions
_EXPIRED = "idle beyond the session TTL"


class Router:
    """Owns the open sessions of one shard, their ledgers, and its load on the workers."""

    def __init__(self, shard: int, config: PoolConfig, own_process: bool = False) -> None:
        """``own_process`` says that nothing else in this process needs torch."""
        self.shard, self.config = shard, config
        self._own_process = own_process
        self._sessions = Sessions(config.router.session_ttl_s, config.router.ephemeral_ttl_s)
        self._roster = Roster()
        self._counts: Counter[str] = Counter()
        self._version = 0
        self._storing: dict[str, asyncio.Task[Json]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._turns: Turns | None = None
        self.url: str | None = None

    async def load(self) -> pa.Schema:
        """Load tokenizer and chat template; returns the Arrow schema of the rows to come.

        Raises:
            ModelNotFound: no such model on this node. ConfigError: it has no chat template.
        """
        self._template = await asyncio.to_thread(self._load_template)
        self.schema = row_schema(self.config.engine.model, self._template.digest)
        return self.schema

    async def start(self, buffer: Any, address: str | None = None) -> str | None:
        """Begin to serve, rows to actor ``buffer``; returns the URL, ``address`` for a wildcard."""
        self._buffer = buffer
        self._turns = Turns(self.shard, self.config, self._template, self._roster)
        block = self.config.buffer
        self._outbox = Outbox(self.schema, self._append, block.block_rows, block.block_bytes)
        self._loops = [
            asyncio.create_task(self._outbox.run(), name="outbox"),
            asyncio.create_task(self._expire(), name="expiry"),
        ]
        http = self.config.router.http
        if http.enabled:
            try:
                self._runner, self.url = await serve(self, http)
            except OSError as error:
                raise StartFailed(http.explain(error)) from None
            self.url = http.url_at(address, self.url)
        return self.url

    async def stop(self) -> None:
        """Close the front door and all connections; open sessions end with the router."""
        if self._runner is not None:
            await self._runner.cleanup()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._turns is not None:
            await self._turns.close()

    async def set_roster(self, workers: list[WorkerInfo], version: int) -> None:
        """Take the controller's word for who serves, and which weights are current."""
        self._roster.update(workers)
        self._version = version

    async def models(self) -> list[str]:
        """Names that requests may give as ``model``."""
        return list(dict.fromkeys([self.config.engine.model, self.config.name]))

    async def serving(self) -> int:
        """How many workers take turns now."""
        return len(self._roster.serving)

    async def respond(
        self,
        body: Mapping[str, Any],
        session_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        record: bool = True,
    ) -> Json:
        """Answer one Responses body. Without a session id the session is ephemeral.

        Raises:
            BadRequest, NotFound, Conflict: the call is wrong; nothing was sampled or kept.
            WorkerLost, TimedOut, BadEngineReply, PoolNotReady: nothing of this turn is trained.
        """
        with self._counted():
            request = parse(body, self.config.sampling)
            self._check_model(request.model)
            named = session_name(session_id, body)
            declaration = Declaration(group_id=group_id, group_size=group_size, record=record)
            name = f"eph-{uuid.uuid4().hex}" if named is None else named
            session = self._sessions.open(name, time.time(), declaration, ephemeral=named is None)
            session.in_flight += 1
            try:
                return await self._ready().run(session, request)
            finally:
                session.in_flight -= 1
                self._sessions.settle(session, time.time())
                if session.id not in self._sessions:
                    self._roster.forget(session.id)

    async def open_session(
        self,
        session_id: str,
        group_id: str | None = None,
        group_size: int | None = None,
        record: bool = True,
        metadata: Json | None = None,
    ) -> Json:
        """Declare a session before its first request; repeating it is harmless."""
        declaration = Declaration(
            group_id=group_id, group_size=group_size, record=record, metadata=metadata or {}
        )
        with self._counted():
            session = self._sessions.open(session_id, time.time(), declaration, declare=True)
        return {"session_id": session.id, "trajectory_id": session.trajectory_id}

    async def finish(
        self,
        session_id: str | None = None,
        reward: float | None = None,
        turn_rewards: list[float] | None = None,
        status: str | None = None,
        metadata: Json | None = None,
        response_id: str | None = None,
        error: str | None = None,
    ) -> Json:
        """Turn a session into rows and store them. The same call again returns the same.

        Without ``status`` it is ``length`` if the last turn hit its limit, else ``completed``;
        a session that never generated leaves a row without tokens and status ``error``.
        Turns in flight are awaited.

        Raises:
            NotFound: no such session. Conflict: it was finished otherwise.
            BadRequest: a value is wrong; the session stays open.
            RolloutError: the buffer did not confirm; make the same call again.
        """
        with self._counted():
            session = self._find(session_id, response_id)
            outcome = Outcome.of(
                session.declaration, reward, turn_rewards, status, metadata, response_id, error
            )
            self._sessions.begin_finish(session, outcome)
            if session.result is not None:
                return session.result
            # A caller that goes away must not leave it open whether rows were stored.
            return await asyncio.shield(self._store_once(session, outcome))

    async def status(self) -> Json:
        """Sessions, counts, and this router's load on each worker."""
        return {
            "shard": self.shard,
            "url": self.url,
            "sessions": len(self._sessions),
            "counts": dict(self._counts + self._ready().counts),
            "routes": {str(reason): count for reason, count in self._roster.reasons.items()},
            "load": {w.name: self._roster.load(w.name) for w in self._roster.serving},
        }

    def _ready(self) -> Turns:
        if self._turns is None:
            raise PoolNotReady("the router has not started yet; wait for the pool to be ready")
        return self._turns

    def _load_template(self) -> ChatTemplate:
        engine = self.config.engine
        template = ChatTemplate(
            models.resolve(engine.model),
            trust_remote_code=engine.trust_remote_code,
            options=self.config.sampling.chat_template_kwargs,
            without_torch=self._own_process,
        )
        if self._own_process:
            _collect_seldom()
        return template

    def _store_once(self, session: Session, outcome: Outcome) -> asyncio.Task[Json]:
        storing = self._storing.get(session.id)
        if storing is None:
            storing = asyncio.create_task(self._store(session, outcome))
            self._storing[session.id] = storing
            storing.add_done_callback(lambda _: self._storing.pop(session.id, None))
        return storing

    async def _store(self, session: Session, outcome: Outcome) -> Json:
        while session.in_flight:
            await session.idle.wait()
        try:
            rows = session_rules.rows(session, outcome, self.config.run_id, self._version)
        except RolloutError:
            session.outcome = None  # nothing was sent: the session stays open
            raise
        result = session_rules.result(session, rows)
        if rows:
            await self._outbox.put(rows)
        self._sessions.end_finish(session, result)
        self._roster.forget(session.id)
        self._counts["trajectories"] += 1
        return result

    async def _append(self, batch: pa.RecordBatch) -> int:
        return int(await self._buffer.append.remote(to_ipc(batch)))

    async def _expire(self) -> None:
        """Close idle sessions a few at a time."""
        while True:
            await asyncio.sleep(min(_EXPIRY_S, self.config.router.session_ttl_s / 4))
            while idle := self._sessions.expired(time.time()):
                for session in idle:
                    await self._close_idle(session)

    async def _close_idle(self, session: Session) -> None:
        """Declared ones leave an aborted row; a finish that was not confirmed is made again."""
        if not self._sessions.is_idle(session, time.time()):
            return  # used while others were closed
        if session.outcome is None:
            self._counts["expired_sessions"] += 1
            if not session.declared:
                self._sessions.drop(session)
                self._roster.forget(session.id)
                return
            session.outcome = Outcome.of(session.declaration, status="aborted", error=_EXPIRED)
        try:
            await self._store_once(session, session.outcome)
        except RolloutError:
            self._sessions.touch(session, time.time())  # others first; later again

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.config.name, self.config.engine.model):
            raise NotFound(
                f"model {model!r:.100} is not served here; this pool serves "
                f"{self.config.engine.model!r}",
                "model",
                "model_not_found",
            )

    def _find(self, session_id: str | None, response_id: str | None) -> Session:
        if session_id is None:
            if response_id is None:
                raise BadRequest("finish wants a session_id or a response_id", "session_id")
            session_id = session_of(response_id)
        return self._sessions.get(session_id)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RolloutError as error:
            self._counts[f"error.{error.code}"] += 1
            raise


def _collect_seldom() -> None:
    """Look for cycles less often: a reply is thousands of objects, none of them in one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
