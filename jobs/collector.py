"""Rolls out episodes over a pool, many at once, and writes their rows as they become ready.

An episode that fails leaves a row with its cause; one whose body was refused leaves nothing, for
nothing was sampled; one that is abandoned at a stop leaves nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError
from results import Errors, Reporter, Summary, Writer
from tasks import SOLVED, Agent, Json, Outcome, Prompt, Task, answer, solve

from rollout_workers.errors import BadRequest, Conflict, NotFound, PoolNotReady, RolloutError
from rollout_workers.pool import RolloutPool

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

    def __init__(
        self, pool: RolloutPool, writer: Writer, reporter: Reporter, errors: Errors
    ) -> None:
        self._pool, self._writer, self._reporter = pool, writer, reporter
        self.summary, self.errors = Summary(), errors
        self.stopped: str | None = None  # why no more episodes start
        self.succeeded = self.abandoned = 0
        self._solved = self._tokens = 0
        self.seconds = self._started = 0.0
        self._rolling: set[asyncio.Task[Outcome]] = set()
        self._ready = 0  # trajectories that the pool holds for us
        self._due, self._ended = asyncio.Event(), False

    async def run(self, episodes: Iterator[Episode], concurrency: int) -> None:
        """Roll out all episodes, ``concurrency`` at once, and write their rows."""
        self._started = time.monotonic()
        storing = asyncio.create_task(self._store(), name="store")
        try:
            await asyncio.gather(*(self._lane(episodes) for _ in range(concurrency)))
        finally:
            self.seconds = time.monotonic() - self._started
            self._ended = True
            self._due.set()
            await storing

    def stop(self, why: str) -> None:
        """Start no more episodes and abandon those under way; finished ones are kept."""
        self.stopped = self.stopped or why
        for task in self._rolling:
            task.cancel()

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
        except RayTaskError as error:  # the call failed by itself; others may do better
            await self._fail(episode, error)
        except RayError as error:
            self.errors.add(type(error).__name__, _first_line(error))
            self.stop(f"the pool is lost: {_first_line(error)}")
        except Exception as error:  # an agent may raise anything; its row says what
            await self._fail(episode, error)
            if isinstance(error, PoolNotReady):
                self.stop(await self._why_not_ready(error))
        else:
            self.succeeded += await self._finish(episode, outcome)
            self._solved += (outcome.reward or 0.0) >= SOLVED
        rate = self._tokens / (time.monotonic() - self._started)
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
        first = error.__cause__ or error
        cause = first.code if isinstance(first, RolloutError) else type(first).__name__
        self.errors.add(cause, str(first))
        await self._finish(episode, Outcome(status="error"), error=f"{cause}: {first}")

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

    async def _why_not_ready(self, error: PoolNotReady) -> str:
        """What became of the workers, which says more than that there is none."""
        try:
            workers = (await _answer(self._pool.status()))["workers"]
        except (RolloutError, RayError):
            return str(error)
        reasons = [f"{w['name']} is {w['state']}: {w['reason']}" for w in workers if w["reason"]]
        return "; ".join(["no worker serves", *reasons])

    async def _store(self) -> None:
        """Write rows while episodes go on, and what is left when they have ended."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), _FLUSH_S)
            self._due.clear()
            last = self._ended
            await self._store_ready()
            if last:
                return

    async def _store_ready(self) -> None:
        """Take what is ready; rows are acknowledged once their file is whole."""
        self._ready = 0
        try:
            while len(batch := await _answer(self._pool.take(_ROWS_PER_FILE))):
                self.summary.add(await asyncio.to_thread(self._writer.write, batch.table))
                await _answer(batch.ack())
        except OSError as error:
            self.stop(f"rows cannot be written: {error}")
        except (RolloutError, RayError) as error:
            self.stop(f"rows cannot be taken: {_first_line(error)}")


async def _answer(reference: Any) -> Any:
    """The value of an object reference; errors of ours come without Ray's around them."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, RolloutError):
            raise error.cause from None
        raise


async def _patiently(call: Callable[[], Any]) -> Any:
    """Call again, after a pause, what may succeed later; the first error is the cause of others."""
    first: RolloutError | None = None
    for pause in _PAUSES_S:
        try:
            return await _answer(call())
        except RolloutError as error:
            if not error.retryable:
                raise error from first
            first = first or error
        await asyncio.sleep(pause)
    try:
        return await _answer(call())
    except RolloutError as error:
        raise error from first


def task_episodes(
    task: Task, prefix: str, groups: int, group_size: int, max_turns: int
) -> Iterator[Episode]:
    """``group_size`` episodes of each question, group by group, under the same ids every run."""
    for number in range(groups):
        question = task[number]
        for sample in range(group_size):
            yield Episode(
                session_id=f"{prefix}.g{number}.{sample}",
                group_id=f"{prefix}.g{number}",
                group_size=group_size,
                agent=functools.partial(solve, task, question, max_turns=max_turns),
            )


def prompt_episodes(prompts: list[Prompt], prefix: str) -> Iterator[Episode]:
    """One episode of one turn for each line."""
    for prompt in prompts:
        yield Episode(
            session_id=f"{prefix}.line{prompt.line}",
            line=prompt.line,
            agent=functools.partial(answer, prompt),
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
