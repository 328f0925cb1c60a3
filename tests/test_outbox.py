"""The outbox: blocks grow with load, and whoever put rows learns what became of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_buffer import SCHEMA, rows

from rollout_workers.errors import BadEngineReply, NotStored, Overloaded, RolloutError
from rollout_workers.outbox import Outbox


class Receiver:
    """Takes blocks when it is let, and fails when it is told to."""

    def __init__(self) -> None:
        self.blocks: list[list[str]] = []
        self.failures: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()

    @property
    def received(self) -> list[str]:
        return list(itertools.chain(*self.blocks))

    async def __call__(self, batch: pa.RecordBatch) -> int:
        await self.open.wait()
        self.blocks.append(batch["trajectory_id"].to_pylist())
        if self.failures:
            raise self.failures.pop(0)
        return int(batch.num_rows)


@asynccontextmanager
async def running(
    receiver: Receiver, max_rows: int = 100, max_bytes: int = 1 << 20
) -> AsyncIterator[Outbox]:
    outbox = Outbox(SCHEMA, receiver, max_rows, max_bytes)
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def put_all(outbox: Outbox, *trajectories: Any) -> list[Any]:
    """Put all at once while the receiver is closed, then open it."""
    return await asyncio.gather(*(outbox.put(t) for t in trajectories), return_exceptions=True)


async def test_a_lone_row_waits_for_nothing() -> None:
    receiver = Receiver()
    async with running(receiver) as outbox, asyncio.timeout(5):
        await outbox.put(rows("t1", segments=2))
        await outbox.put(rows("t2"))
    assert receiver.blocks == [["t1", "t1"], ["t2"]]


async def test_blocks_grow_while_one_is_under_way() -> None:
    receiver = Receiver()
    receiver.open.clear()
    async with running(receiver) as outbox:
        first = asyncio.create_task(outbox.put(rows("t0")))
        await asyncio.sleep(0.01)
        rest = asyncio.create_task(put_all(outbox, *(rows(f"t{i}") for i in range(1, 50))))
        await asyncio.sleep(0.01)
        receiver.open.set()
        await first
        assert await rest == [None] * 49
    assert receiver.blocks == [["t0"], [f"t{i}" for i in range(1, 50)]]


@pytest.mark.parametrize(
    ("max_rows", "max_bytes", "sizes"),
    [
        (4, 1 << 20, [4, 4, 2]),
        (100, 9 * 8, [2, 2, 2, 2, 2]),  # rows of 4 tokens at 9 bytes
        (1, 1, [1] * 10),
    ],
)
async def test_blocks_are_bounded(max_rows: int, max_bytes: int, sizes: list[int]) -> None:
    receiver = Receiver()
    async with running(receiver, max_rows, max_bytes) as outbox:
        assert await put_all(outbox, *(rows(f"t{i}") for i in range(10))) == [None] * 10
    assert [len(block) for block in receiver.blocks] == sizes
    assert receiver.received == [f"t{i}" for i in range(10)]


async def test_a_trajectory_is_never_split() -> None:
    receiver = Receiver()
    async with running(receiver, max_rows=2) as outbox:
        await put_all(outbox, rows("t1"), rows("t2", segments=5), rows("t3"))
    assert receiver.blocks == [["t1"] + ["t2"] * 5, ["t3"]]


async def test_failure_reaches_those_whose_rows_it_were() -> None:
    receiver = Receiver()
    receiver.failures = [ConnectionError("gone"), Overloaded("full", None, "buffer_full")]
    async with running(receiver, max_rows=2) as outbox:
        results = await put_all(outbox, *(rows(f"t{i}") for i in range(6)))
        assert [type(result) for result in results] == [
            NotStored,
            NotStored,
            Overloaded,
            Overloaded,
            type(None),
            type(None),
        ]
        assert "ConnectionError: gone" in str(results[0])
        assert results[0].code == "not_stored"
        assert results[2].code == "buffer_full"
        await outbox.put(rows("t0"))  # again
    assert receiver.blocks[-1] == ["t0"]


async def test_broken_row_is_refused_alone() -> None:
    receiver = Receiver()
    [good] = rows("t1")
    broken = replace(good, logprobs=np.full(4, np.nan, np.float32))
    async with running(receiver) as outbox:
        results = await put_all(outbox, [good], [broken], rows("t3"))
    assert [type(result) for result in results] == [type(None), BadEngineReply, type(None)]
    assert receiver.blocks == [["t1", "t3"]]


async def test_row_that_arrow_cannot_hold_is_refused_alone() -> None:
    receiver = Receiver()
    [good] = rows("t1")
    async with running(receiver) as outbox:
        results = await put_all(
            outbox,
            [good],
            [replace(good, trajectory_id="t2", group_size=2**40)],
            [replace(good, trajectory_id="t3", error="\ud800")],
            rows("t4"),
        )
    assert [type(result) for result in results] == [
        type(None),
        RolloutError,
        RolloutError,
        type(None),
    ]
    assert receiver.received == ["t1", "t4"]


async def test_caller_that_went_away_loses_nothing() -> None:
    receiver = Receiver()
    receiver.open.clear()
    async with running(receiver) as outbox:
        first = asyncio.create_task(outbox.put(rows("t1")))
        second = asyncio.create_task(outbox.put(rows("t2")))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        receiver.open.set()
        await second
        await outbox.put(rows("t3"))
    assert receiver.received == ["t1", "t2", "t3"]


async def test_stopping_leaves_nobody_waiting() -> None:
    receiver = Receiver()
    receiver.open.clear()
    async with running(receiver, max_rows=1) as outbox:
        waiting = [asyncio.create_task(outbox.put(rows(f"t{i}"))) for i in range(3)]
        await asyncio.sleep(0.01)
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert {type(result) for result in results} == {NotStored}
