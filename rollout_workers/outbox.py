"""Rows on their way to the buffer, sent in blocks.

While one block is under way the next one fills, and under load it fills a little longer. So blocks
grow with load and a lone row waits for nothing. ``put`` returns when the buffer has the rows.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from rollout_workers.errors import NotStored, RolloutError
from rollout_workers.schema import Row, check, record_batch

Send = Callable[[pa.RecordBatch], Awaitable[int]]
_Waiting = tuple[Sequence[Row], asyncio.Future[None]]
_PACE_S = 0.02  # between blocks under load: each costs two processes about a millisecond
_ROW_BYTES = 9  # per token: int32 id, float32 logprob, uint8 mask


class Outbox:
    """Owns rows that the buffer has not acknowledged yet."""

    def __init__(self, schema: pa.Schema, send: Send, max_rows: int, max_bytes: int) -> None:
        self._schema, self._send = schema, send
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._waiting: deque[_Waiting] = deque()
        self._filled = asyncio.Event()

    async def put(self, rows: Sequence[Row]) -> None:
        """Send all rows of one trajectory; they travel in one block.

        Raises:
            BadEngineReply: a row breaks an invariant; nothing of it was sent.
            RolloutError: the buffer could not store them; putting them again is safe.
        """
        for row in rows:
            check(row)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, done))
        self._filled.set()
        await done

    async def run(self) -> None:
        """Send blocks until cancelled; then whoever still waits is told."""
        block: list[_Waiting] = []
        started = 0.0
        try:
            while True:
                await self._filled.wait()
                if len(block) > 1:
                    await self._fill_up(started)
                started = time.monotonic()
                block = self._next_block()
                await self._send_block(block)
                if not self._waiting:
                    self._filled.clear()
        finally:
            _tell([*block, *self._waiting], _lost("the router stops"))

    async def _fill_up(self, last: float) -> None:
        """Wait until it is time for another block, or there is enough for a whole one."""
        while (pause := last + _PACE_S - time.monotonic()) > 0:
            if len(self._waiting) >= self._max_rows:
                return
            await asyncio.sleep(min(pause, _PACE_S / 4))

    def _next_block(self) -> list[_Waiting]:
        block, count, size = [], 0, 0
        while self._waiting and count < self._max_rows and size < self._max_bytes:
            rows, done = self._waiting.popleft()
            block.append((rows, done))
            count += len(rows)
            size += sum(len(row.token_ids) * _ROW_BYTES for row in rows)
        return block

    async def _send_block(self, block: list[_Waiting]) -> None:
        try:
            batch = record_batch([row for rows, _ in block for row in rows], self._schema)
        except Exception as error:  # a value that its column cannot hold
            if len(block) > 1:  # the others must not suffer for it
                for one in block:
                    await self._send_block([one])
                return
            _tell(block, RolloutError(f"not a row: {type(error).__name__}: {error}"))
            return
        try:
            await self._send(batch)
        except RolloutError as error:
            _tell(block, error)
        except Exception as error:  # whatever went wrong belongs to those who wait for it
            _tell(block, _lost(f"{type(error).__name__}: {error}"))
        else:
            _tell(block, None)


def _tell(block: Sequence[_Waiting], error: RolloutError | None) -> None:
    for _, done in block:
        if done.done():  # the caller went away
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _lost(cause: str) -> RolloutError:
    text = f"the buffer did not confirm the rows: {cause}; finish again"
    return NotStored(text)
