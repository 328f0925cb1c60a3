"""The buffer as a plain class: stored before it says so, leased, and handed out whole."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from local import Local

from rollout_workers.buffer import Batch, Buffer
from rollout_workers.config import BufferConfig
from rollout_workers.errors import BadRequest, Conflict, PoolNotReady, RolloutError
from rollout_workers.schema import Row, Span, TurnRecord, record_batch, row_schema, to_ipc

SCHEMA = row_schema("m", "d")


def rows(name: str, segments: int = 1, width: int = 4, **fields: Any) -> list[Row]:
    """A trajectory of ``segments`` rows, each of which names it in its ids."""
    made = []
    for segment in range(segments):
        ids = np.full(width, int(name.strip("t") or 0) * 100 + segment, np.int32)
        mask = np.zeros(width, np.uint8)
        mask[1:] = 1
        turn = TurnRecord(response_id="r", start=1, end=width, finish_reason="stop", worker="w0")
        made.append(
            Row(
                trajectory_id=name,
                session_id=f"s-{name}",
                segment=segment,
                num_segments=segments,
                prompt_length=1,
                token_ids=ids,
                loss_mask=mask,
                logprobs=-0.5 * mask.astype(np.float32),
                versions=(Span(start=1, end=width, version=0),),
                min_version=0,
                max_version=0,
                turns=(turn,),
                status="completed",
                segment_reason="start",
                run_id="run",
                **fields,
            )
        )
    return made


def block(*trajectories: list[Row]) -> pa.RecordBatch:
    return record_batch([row for rows_ in trajectories for row in rows_], SCHEMA)


def ids_of(batch: Batch) -> list[str]:
    return batch.row_ids


def is_there(path: Path) -> bool:
    return path.exists()


async def new(directory: Path | None = None, **settings: Any) -> Buffer:
    buffer = Buffer(BufferConfig(directory=directory, **settings))
    await buffer.open(SCHEMA, Local(buffer))
    return buffer


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Buffer]:
    made = await new(tmp_path)
    yield made
    await made.stop()


async def test_rows_come_back_as_they_were(buffer: Buffer) -> None:
    sent = block(rows("t1", reward=0.5, group_id="g"), rows("t2", segments=2))
    assert await buffer.append(sent) == 3
    batch = await buffer.take(n=5)
    assert batch.table.equals(pa.Table.from_batches([sent]))
    assert batch.table.schema.equals(SCHEMA, check_metadata=True)
    assert len(batch) == 3
    assert ids_of(batch) == ["t1/0", "t2/0", "t2/1"]
    assert await batch.ack() == 2
    assert len(await buffer.take(n=5)) == 0


async def test_rows_may_come_packed(buffer: Buffer) -> None:
    sent = block(rows("t1"), rows("t2", segments=2))
    assert await buffer.append(to_ipc(sent)) == 3
    assert (await buffer.take(n=5)).table.equals(pa.Table.from_batches([sent]))


async def test_segments_of_a_trajectory_stay_together(buffer: Buffer) -> None:
    await buffer.append(block(rows("t1", segments=3), rows("t2"), rows("t3", segments=2)))
    assert ids_of(await buffer.take(n=1)) == ["t1/0", "t1/1", "t1/2"]
    assert ids_of(await buffer.take(n=2)) == ["t2/0", "t3/0", "t3/1"]


async def test_rows_out_of_many_blocks_keep_their_order(buffer: Buffer) -> None:
    for first in (1, 3, 5):
        await buffer.append(block(rows(f"t{first}"), rows(f"t{first + 1}")))
    one = await buffer.take(n=1)
    rest = await buffer.take(n=3)
    assert ids_of(rest) == ["t2/0", "t3/0", "t4/0"]
    assert [row[0] for row in rest.table["token_ids"].to_pylist()] == [200, 300, 400]
    await one.nack()
    assert ids_of(await buffer.take(n=9)) == ["t1/0", "t5/0", "t6/0"]


async def test_repeated_delivery_adds_nothing(buffer: Buffer) -> None:
    sent = block(rows("t1"), rows("t2", segments=2))
    assert await buffer.append(sent) == 3
    assert await buffer.append(sent) == 0
    assert await buffer.append(block(rows("t2", segments=2), rows("t3"))) == 1
    batch = await buffer.take(n=9)
    assert ids_of(batch) == ["t1/0", "t2/0", "t2/1", "t3/0"]
    await batch.ack()
    assert await buffer.append(sent) == 0
    status = await buffer.status()
    assert (status["rows"], status["repeated_trajectories"]) == (4, 5)
    assert status["waiting"] == 0


async def test_leases_end(tmp_path: Path) -> None:
    buffer = await new(tmp_path, lease_s=0.2)
    await buffer.append(block(rows("t1")))
    first = await buffer.take(n=1)
    assert len(await buffer.take(n=1)) == 0
    again = await buffer.take(n=1, wait_s=5)  # woken by the end of the lease
    assert ids_of(again) == ids_of(first)
    with pytest.raises(Conflict):
        await first.ack()
    assert await again.ack() == 1
    assert await again.ack() == 0
    assert (await buffer.status())["expired_leases"] == 1
    await buffer.stop()


async def test_take_waits_for_what_it_asked(buffer: Buffer) -> None:
    await buffer.append(block(rows("t1")))
    waiting = asyncio.create_task(buffer.take(n=2, wait_s=5))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await buffer.append(block(rows("t2")))
    assert ids_of(await waiting) == ["t1/0", "t2/0"]


async def test_take_waits_for_a_nack(buffer: Buffer) -> None:
    await buffer.append(block(rows("t1")))
    first = await buffer.take(n=1)
    waiting = asyncio.create_task(buffer.take(n=1, wait_s=5))
    await asyncio.sleep(0.02)
    assert await first.nack() == 1
    assert ids_of(await waiting) == ["t1/0"]


async def test_take_gives_what_there_is_when_time_is_up(buffer: Buffer) -> None:
    await buffer.append(block(rows("t1")))
    assert ids_of(await buffer.take(n=4, wait_s=0.05)) == ["t1/0"]
    empty = await buffer.take(n=1, wait_s=0.05)
    assert len(empty) == 0
    assert empty.table.schema.equals(SCHEMA, check_metadata=True)
    assert await empty.ack() == 0


async def test_whole_groups(buffer: Buffer) -> None:
    of_g = {"group_id": "g", "group_size": 3}
    await buffer.append(block(rows("t1", **of_g), rows("t2"), rows("t3", segments=2, **of_g)))
    assert len(await buffer.take(groups=1)) == 0
    waiting = asyncio.create_task(buffer.take(groups=1, wait_s=5))
    await asyncio.sleep(0.02)
    await buffer.append(block(rows("t4", **of_g)))
    group = await waiting
    assert ids_of(group) == ["t1/0", "t3/0", "t3/1", "t4/0"]
    await group.nack()  # the consumer crashed
    assert ids_of(await buffer.take(groups=1)) == ids_of(group)
    assert ids_of(await buffer.take(n=9)) == ["t2/0"]


@pytest.mark.parametrize("asked", [{}, {"n": 0}, {"n": 1, "groups": 1}, {"groups": "2"}])
async def test_wrong_take(buffer: Buffer, asked: Any) -> None:
    with pytest.raises(BadRequest):
        await buffer.take(**asked)


async def test_full_disk(buffer: Buffer) -> None:
    await buffer.append(block(rows("t1")))
    size = (await buffer.status())["spool_bytes"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(RolloutError, match="could not be stored") as caught:
            await buffer.append(block(rows("t2", width=5_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == "not_stored"
    assert (await buffer.status())["spool_bytes"] == size
    assert ids_of(await buffer.take(n=9)) == ["t1/0"]
    assert await buffer.append(block(rows("t2", width=5_000))) == 1  # the sender tries again
    assert ids_of(await buffer.take(n=9)) == ["t2/0"]


async def test_rows_of_another_pool(buffer: Buffer) -> None:
    other = record_batch(rows("t1"), row_schema("m", "another template"))
    with pytest.raises(RolloutError, match="differs"):
        await buffer.append(other)
    assert await buffer.append(block(rows("t1"))) == 1


async def test_take_copies_nothing(buffer: Buffer) -> None:
    await buffer.append(block(*(rows(f"t{i}", width=500_000) for i in range(4))))
    before = pa.total_allocated_bytes()
    batch = await buffer.take(n=4)
    assert batch.table.nbytes > 16_000_000
    assert pa.total_allocated_bytes() - before < 100_000


async def test_part_of_a_block_does_not_drag_it_along(buffer: Buffer) -> None:
    """What goes into the object store is as large as its rows, not as its block."""
    await buffer.append(block(*(rows(f"t{i}", width=50_000) for i in range(8))))
    batch = await buffer.take(n=1)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.table.schema) as writer:
        writer.write_table(batch.table)
    assert batch.table.get_total_buffer_size() < 1_000_000
    assert sink.getvalue().size < 1_000_000


async def test_taken_rows_outlive_the_buffer(tmp_path: Path) -> None:
    buffer = await new(tmp_path)
    await buffer.append(block(rows("t1")))
    batch = await buffer.take(n=1)
    await buffer.stop()
    shutil.rmtree(tmp_path)
    assert batch.table["token_ids"].to_pylist() == [[100] * 4]


async def test_a_spool_of_its_own_stays_only_while_it_holds_unread_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for acknowledge in (False, True):
        buffer = await new()
        await buffer.append(block(rows("t1")))
        batch = await buffer.take(n=1)
        if acknowledge:
            await buffer.ack(batch.lease)
        word = await buffer.stop()
        assert word["unread"] == (0 if acknowledge else 1)
        assert is_there(Path(word["spool"])) is not acknowledge
        assert Path(word["spool"]).is_relative_to(tmp_path)


async def test_a_given_directory_keeps_the_spool(tmp_path: Path) -> None:
    buffer = await new(tmp_path / "spool")
    await buffer.append(block(rows("t1")))
    await buffer.stop()
    [spool] = (tmp_path / "spool").iterdir()
    with pa.ipc.open_stream(spool.read_bytes()) as reader:
        assert reader.read_all()["trajectory_id"].to_pylist() == ["t1"]


async def test_before_it_is_open() -> None:
    buffer = Buffer(BufferConfig())
    for call in (buffer.append(block(rows("t1"))), buffer.status()):
        with pytest.raises(PoolNotReady):
            await call
    await buffer.stop()
