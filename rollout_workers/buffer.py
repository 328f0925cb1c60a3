"""The buffer actor: finished trajectories between the routers and the trainer.

Rows are in the spool file before their router is told so. ``take`` reads them back by memory map
and returns them, so that the taker owns the object: it outlives this actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollout_workers.backlog import Backlog, Entry, check_take
from rollout_workers.config import BufferConfig
from rollout_workers.errors import NotStored, PoolNotReady
from rollout_workers.journal import Block, Journal
from rollout_workers.node import node_dir
from rollout_workers.schema import from_ipc, row_id


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows ``[start, start + rows)`` of a block."""

    block: Block
    start: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one ``take`` returned: rows to train on, held until ``ack``.

    ``table`` is read-only memory of the object store; copy what you change.
    """

    table: pa.Table
    lease: int
    _buffer: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def row_ids(self) -> list[str]:
        """By these a consumer recognises rows it was given before."""
        ids, segments = self.table["trajectory_id"], self.table["segment"]
        return [row_id(t, s) for t, s in zip(ids.to_pylist(), segments.to_pylist(), strict=True)]

    def ack(self) -> Any:
        """Say that these rows are done with; returns an awaitable object reference."""
        return self._buffer.ack.remote(self.lease)

    def nack(self) -> Any:
        """Give these rows back at once; returns an awaitable object reference."""
        return self._buffer.nack.remote(self.lease)


class Buffer:
    """Owns finished trajectories: the spool and the backlog."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._backlog: Backlog[_Place] = Backlog(config.lease_s)
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._journal: Journal | None = None

    async def open(self, schema: pa.Schema, handle: Any) -> None:
        """Begin a spool of rows of ``schema``.

        ``handle`` is this actor's own, which batches need to acknowledge themselves.
        """
        directory = self._config.directory or node_dir("spools")
        name = f"rows-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09d}.arrows"
        self._journal = Journal(directory / name, schema, fsync=self._config.fsync)
        self._schema, self._handle = schema, handle

    async def append(self, rows: pa.RecordBatch | pa.Buffer) -> int:
        """Store rows; all segments of a trajectory come in one batch, next to each other.

        Between processes they travel as ``to_ipc`` packs them. Returns how many rows were new: a
        repeated delivery adds none.

        Raises:
            NotStored: the rows could not be stored; the caller still holds them.
        """
        batch = rows if isinstance(rows, pa.RecordBatch) else from_ipc(rows)
        groups = list(_trajectories(batch))
        new = [
            (start, rows) for start, rows, entry_id in groups if not self._backlog.knows(entry_id)
        ]
        if len(new) < len(groups):
            self._counts["repeated_trajectories"] += len(groups) - len(new)
            keep = [i for start, rows in new for i in range(start, start + rows)]
            batch = batch.take(pa.array(keep, pa.int64()))
        if not batch.num_rows:
            return 0
        try:
            block = self._spool.append(batch)
        except (OSError, ValueError) as error:
            raise NotStored(f"rows could not be stored: {error}; finish again") from None
        self._backlog.add(_entries(batch, block))
        self._counts["rows"] += batch.num_rows
        self._wake()
        return batch.num_rows

    async def take(
        self,
        n: int | None = None,
        groups: int | None = None,
        wait_s: float = 0.0,
        consumer: str = "trainer",
    ) -> Batch:
        """Lease up to ``n`` trajectories or ``groups`` complete groups, oldest first.

        Waits up to ``wait_s`` seconds for all of them and then returns what there is, possibly
        nothing. All segments of a trajectory come together.
        """
        check_take(n, groups)
        deadline = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            self._counts["expired_leases"] += len(self._backlog.expire(now))
            ready = self._backlog.ready(n, groups)
            if now >= deadline or _enough(ready, n, groups):
                break
            until = min(deadline, self._backlog.next_end() or deadline)
            await self._wait(until - now)
        lease = self._backlog.lease(ready, consumer, now)
        table = pa.Table.from_batches([self._read(e) for e in _merged(ready)], self._schema)
        return Batch(table, lease.id, self._handle)

    async def ack(self, lease_id: int) -> int:
        """Forget the trajectories of a lease; returns how many."""
        return self._backlog.ack(lease_id)

    async def nack(self, lease_id: int) -> int:
        """Offer the trajectories of a lease again; returns how many."""
        count = self._backlog.nack(lease_id)
        self._wake()
        return count

    async def status(self) -> dict[str, Any]:
        """Counts since the start, and what is waiting now."""
        return {
            "waiting": self._backlog.waiting,
            "incomplete_groups": self._backlog.incomplete_groups,
            "leased": self._backlog.leased,
            "acked": self._backlog.acked,
            "spool": str(self._spool.path),
            "spool_bytes": self._spool.num_bytes,
            **{name: self._counts[name] for name in _COUNTS},
        }

    async def stop(self) -> dict[str, Any]:
        """Close the spool; returns how many trajectories nobody acknowledged, and where they are.

        A spool in a directory that was not chosen is removed if all of it was acknowledged.
        """
        unread = self._backlog.waiting + self._backlog.leased
        if self._journal is None:
            return {"unread": unread, "spool": None}
        self._journal.close()
        if self._config.directory is None and not unread:
            self._journal.path.unlink(missing_ok=True)
        return {"unread": unread, "spool": str(self._journal.path)}

    @property
    def _spool(self) -> Journal:
        if self._journal is None:
            raise PoolNotReady("the buffer has not started yet; wait for the pool to be ready")
        return self._journal

    def _read(self, place: tuple[_Place, int]) -> pa.RecordBatch:
        at, rows = place
        batch = self._spool.read(at.block)
        if rows == batch.num_rows:
            return batch
        # A slice would carry its whole parent into the object store.
        return batch.take(pa.array(range(at.start, at.start + rows), pa.int64()))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(0.0, seconds))


_COUNTS = ("rows", "repeated_trajectories", "expired_leases")


def _trajectories(batch: pa.RecordBatch) -> Iterator[tuple[int, int, str]]:
    """(first row, number of rows, id) of each trajectory in a batch."""
    ids = batch.column("trajectory_id").to_pylist()
    counts = batch.column("num_segments").to_pylist()
    start = 0
    while start < len(ids):
        yield start, counts[start], ids[start]
        start += counts[start]


def _entries(batch: pa.RecordBatch, block: Block) -> list[Entry[_Place]]:
    group_ids = batch.column("group_id").to_pylist()
    sizes = batch.column("group_size").to_pylist()
    return [
        Entry(
            trajectory_id=trajectory_id,
            group_id=group_ids[start],
            group_size=sizes[start],
            rows=rows,
            place=_Place(block, start),
        )
        for start, rows, trajectory_id in _trajectories(batch)
    ]


def _enough(ready: list[Entry[_Place]], n: int | None, groups: int | None) -> bool:
    if n is not None:
        return len(ready) >= n
    return len({entry.group_id for entry in ready}) >= (groups or 0)


def _merged(entries: list[Entry[_Place]]) -> list[tuple[_Place, int]]:
    """Places with neighbours in one block joined, so that whole blocks are read whole."""
    merged: list[tuple[_Place, int]] = []
    for entry in entries:
        if merged:
            last, rows = merged[-1]
            if last.block == entry.place.block and last.start + rows == entry.place.start:
                merged[-1] = (last, rows + entry.rows)
                continue
        merged.append((entry.place, entry.rows))
    return merged
