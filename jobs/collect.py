"""Roll out episodes over a pool and write their trajectories to Parquet files.

``python jobs/collect.py`` asks a small model one-digit sums on the CPU: question, answer, the
verifier's feedback, second try. ``--help`` shows what else it can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from results import Errors, Reporter, Summary, Writer, out_dir
from tasks import SOLVED, Agent, Json, Outcome, Prompt, Task, answer, read_prompts, solve

from rollout_workers import PoolConfig, RolloutPool  # before ray: it sets what ray reads
from rollout_workers.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    NotFound,
    PoolNotReady,
    RolloutError,
)

# isort: split
import ray
from ray.exceptions import RayError, RayTaskError

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "pool" / "cpu_demo.yaml"
INTERRUPTED = 130
_ROWS_PER_FILE = 1024
_FLUSH_S = 60.0  # a run that is killed loses at most the rows of this long
_PAUSES_S = (1.0, 4.0)  # before the second and third try of what may succeed later
_REFUSED = (BadRequest, NotFound, Conflict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One conversation to come. ``line`` is that of the prompts file it was read from."""

    session_id: str
    agent: Agent
    group_id: str | None = None
    group_size: int | None = None
    line: int | None = None


class Collector:
    """Owns the episodes under way, and the way of their rows from the pool to disk."""

    def __init__(self, pool: RolloutPool, writer: Writer, reporter: Reporter) -> None:
        self._pool, self._writer, self._reporter = pool, writer, reporter
        self.summary, self.errors = Summary(), Errors()
        self.stopped: str | None = None  # why no more episodes start
        self.succeeded = self.abandoned = 0
        self._solved = self._tokens = 0
        self._started = time.monotonic()
        self._rolling: set[asyncio.Task[Outcome]] = set()
        self._ready = 0  # trajectories that the pool holds for us
        self._due = asyncio.Event()

    async def run(self, episodes: Iterator[Episode], concurrency: int) -> None:
        """Roll out all episodes, ``concurrency`` at once, and write their rows."""
        self._started = time.monotonic()
        storing = asyncio.create_task(self._store(), name="store")
        try:
            await asyncio.gather(*(self._lane(episodes) for _ in range(concurrency)))
        finally:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)
        await self._store_ready()

    def stop(self, why: str) -> None:
        """Start no more episodes and abandon those under way; finished ones are kept."""
        self.stopped = self.stopped or why
        for task in self._rolling:
            task.cancel()

    @property
    def seconds(self) -> float:
        """How long the run has taken."""
        return time.monotonic() - self._started

    async def _lane(self, episodes: Iterator[Episode]) -> None:
        while self.stopped is None and (episode := next(episodes, None)) is not None:
            await self._episode(episode)

    async def _episode(self, episode: Episode) -> None:
        try:
            outcome = await self._roll(episode)
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            self.abandoned += 1
            return
        except _REFUSED as error:
            if episode.line is None:
                await self._fail(episode, error)
            else:  # the body is at fault: nothing was sampled, so there is nothing to keep
                self.errors.add(error.code, str(error))
                self._reporter.say(f"line {episode.line}: refused: {error}")
        except RayError as error:
            self.errors.add(type(error).__name__, _first_line(error))
            self.stop(f"the pool is lost: {_first_line(error)}")
        except Exception as error:  # an agent may raise anything; its row says what
            await self._fail(episode, error)
            if isinstance(error, PoolNotReady):
                self.stop(str(error))
        else:
            self.succeeded += await self._finish(episode, outcome)
            self._solved += (outcome.reward or 0.0) >= SOLVED
        rate = self._tokens / max(self.seconds, 1e-9)
        self._reporter.advance(f"{self._solved} solved, {self._tokens} tokens, {rate:.0f} tok/s")

    async def _roll(self, episode: Episode) -> Outcome:
        task = asyncio.create_task(episode.agent(functools.partial(self._respond, episode)))
        self._rolling.add(task)
        try:
            return await task
        finally:
            self._rolling.discard(task)

    async def _respond(self, episode: Episode, body: Json) -> Json:
        who = episode.session_id, episode.group_id, episode.group_size
        reply = await _patiently(lambda: self._pool.respond(body, *who))
        self._tokens += reply["usage"]["output_tokens"]
        return reply

    async def _fail(self, episode: Episode, error: Exception) -> None:
        """Count a failure, and leave a row that says the cause, so that groups become complete."""
        cause = error.code if isinstance(error, RolloutError) else type(error).__name__
        self.errors.add(cause, str(error))
        await self._finish(episode, Outcome(status="error"), error=f"{cause}: {error}")

    async def _finish(self, episode: Episode, outcome: Outcome, error: str | None = None) -> bool:
        told = {"turn_rewards": outcome.turn_rewards, "status": outcome.status, "error": error}
        finish = functools.partial(
            self._pool.finish, episode.session_id, outcome.reward, metadata=outcome.metadata, **told
        )
        try:
            try:
                await _patiently(finish)
            except NotFound:  # its first request was refused
                group = {"group_id": episode.group_id, "group_size": episode.group_size}
                await _answer(self._pool.open_session(episode.session_id, **group))
                await _patiently(finish)
        except (RolloutError, RayError) as lost:
            self.errors.add("finish", _first_line(lost))
            return False
        self._ready += 1
        if self._ready >= _ROWS_PER_FILE:
            self._due.set()
        return True

    async def _store(self) -> None:
        """Write rows while episodes go on."""
        while self.stopped is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), _FLUSH_S)
            self._due.clear()
            storing = asyncio.create_task(self._store_ready())
            await asyncio.shield(storing)

    async def _store_ready(self) -> None:
        """Take what is ready; rows are acknowledged when their file is whole."""
        try:
            while len(batch := await _answer(self._pool.take(_ROWS_PER_FILE))):
                self._ready -= _ROWS_PER_FILE
                self.summary.add(await asyncio.to_thread(self._writer.write, batch.table))
                await _answer(batch.ack())
        except OSError as error:
            self.stop(f"rows cannot be written: {error}")
        except (RolloutError, RayError) as error:
            self.stop(f"rows cannot be taken: {_first_line(error)}")
