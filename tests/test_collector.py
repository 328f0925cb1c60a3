"""Episodes over a pool that answers as scripted: failures, refusals, the stop, and files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from collector import Collector, Episode
from results import Errors, Reporter, Writer
from tasks import Outcome, Prompt, Respond, answer
from test_tasks import rows

from rollout_workers.errors import BadRequest, NotFound, PoolNotReady, WorkerLost

Json = dict[str, Any]
Answer = Callable[[str], Json]
REPLY = {"output": [], "usage": {"output_tokens": 2}}


@dataclass
class Batch:
    table: Any
    pool: FakePool

    def __len__(self) -> int:
        return int(self.table.num_rows)

    async def ack(self) -> None:
        written = self.pool.out.glob("*.parquet")
        on_disk = {i for file in written for i in pq.read_table(file)["trajectory_id"].to_pylist()}
        assert set(self.table["trajectory_id"].to_pylist()) <= on_disk


@dataclass
class FakePool:
    """Sessions that a request opened, and what ``finish`` was told of each."""

    out: Path
    replies: Callable[[str], Json] = lambda session_id: REPLY
    sessions: set[str] = field(default_factory=set)
    opened: list[str] = field(default_factory=list)
    finished: dict[str, Json] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    async def respond(self, body: Json, session_id: str, *group: Any) -> Json:
        if body.get("input") == "bad":
            raise BadRequest("input is bad", "input")
        self.sessions.add(session_id)
        await asyncio.sleep(0)
        return self.replies(session_id)

    async def open_session(self, session_id: str, **declaration: Any) -> Json:
        self.sessions.add(session_id)
        self.opened.append(session_id)
        return {}

    async def finish(self, session_id: str, reward: float | None, **outcome: Any) -> Json:
        if session_id not in self.sessions:
            raise NotFound(f"no session {session_id!r}")
        self.finished[session_id] = {"reward": reward, **outcome}
        self.waiting.append(session_id)
        return {}

    async def take(self, n: int) -> Batch:
        taken, self.waiting = self.waiting, []
        return Batch(rows(*taken), self)

    async def status(self) -> Json:
        worker = {"name": "w0", "state": "down", "reason": "ended by SIGKILL"}
        return {"workers": [worker]}


async def ask(respond: Respond) -> Outcome:
    await respond({"input": "hi"})
    return Outcome(reward=1.0, turn_rewards=[1.0])


def episode(name: str, agent: Any = ask, line: int | None = None) -> Episode:
    return Episode(session_id=name, group_id="g", group_size=2, agent=agent, line=line)


def collector(pool: FakePool) -> Collector:
    return Collector(pool, Writer(pool.out), Reporter(9), Errors())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collector._PAUSES_S", (0.0, 0.0))


async def test_rows_are_on_disk_before_they_are_acknowledged(tmp_path: Path) -> None:
    pool = FakePool(tmp_path)
    run = collector(pool)
    await run.run(iter([episode("a"), episode("b"), episode("c")]), concurrency=2)
    assert (run.succeeded, run.summary.episodes, run.errors.lines()) == (3, 3, [])
    assert {told["reward"] for told in pool.finished.values()} == {1.0}


async def test_an_agent_that_fails_leaves_a_row_with_its_cause(tmp_path: Path) -> None:
    async def broken(respond: Respond) -> Outcome:
        raise KeyError("tool")

    pool = FakePool(tmp_path)
    run = collector(pool)
    await run.run(iter([episode("a", broken), episode("b")]), concurrency=1)
    assert pool.finished["a"]["status"] == "error"
    assert pool.finished["a"]["error"] == "KeyError: 'tool'"
    assert pool.opened == ["a"]  # it never called, and its group becomes complete all the same
    assert run.errors.lines() == ["1 x KeyError: 'tool'"]
    assert run.succeeded == 1


async def test_a_refused_line_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def bad(respond: Respond) -> Outcome:
        return await answer(Prompt(7, {"input": "bad"}), respond)

    pool = FakePool(tmp_path)
    run = collector(pool)
    await run.run(iter([episode("a", bad, line=7)]), concurrency=1)
    assert (pool.finished, pool.opened, run.summary.episodes) == ({}, [], 0)
    assert "line 7: refused: input is bad" in capsys.readouterr().err


async def test_what_is_lost_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    replies = iter([WorkerLost("gone"), REPLY])

    def reply(session_id: str) -> Json:
        if isinstance(found := next(replies), Exception):
            raise found
        return found

    run = collector(FakePool(tmp_path, reply))
    await run.run(iter([episode("a")]), concurrency=1)
    assert (run.succeeded, run.errors.lines()) == (1, [])


async def test_a_dead_pool_ends_the_run_with_the_first_cause(tmp_path: Path) -> None:
    errors = iter([WorkerLost("cut off")])

    def reply(session_id: str) -> Json:
        raise next(errors, PoolNotReady("no worker"))

    pool = FakePool(tmp_path, reply)
    run = collector(pool)
    await run.run(iter([episode("a"), episode("b")]), concurrency=1)
    assert pool.finished["a"]["error"] == "worker_lost: cut off"
    assert "b" not in pool.finished
    assert run.stopped == "no worker serves; w0 is down: ended by SIGKILL"


async def test_stop_keeps_what_is_finished_and_abandons_the_rest(tmp_path: Path) -> None:
    async def endless(respond: Respond) -> Outcome:
        await respond({"input": "hi"})
        await asyncio.Event().wait()
        raise AssertionError

    pool = FakePool(tmp_path)
    run = collector(pool)
    episodes = iter([episode("a"), episode("b", endless), episode("c"), episode("d", endless)])
    asyncio.get_running_loop().call_later(0.2, run.stop, "interrupted")
    await run.run(episodes, concurrency=2)
    assert sorted(pool.finished) == ["a", "c"]
    assert (run.stopped, run.abandoned, run.summary.episodes) == ("interrupted", 2, 2)
