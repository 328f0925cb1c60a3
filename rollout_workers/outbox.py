"""Rows on their way to the buffer, sent in blocks.

While one block is under way the next one fills, so blocks grow with load and a lone row waits for
nothing. ``put`` returns when the buffer has stored the rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from rollout_workers.errors import RolloutError
from rollout_workers.schema import Row, check, record_batch

Send = Callable[[pa.RecordBatch], Awaitable[int]]
_ROW_BYTES = 9  # per token: int32 id, float32 logprob, uint8 mask


class Outbox:
    """Owns rows that the buffer has not acknowledged yet."""

    def __init__(self, schema: pa.Schema, send: Send, max_rows: int, max_bytes: int) -> None:
        self._schema, self._send = schema, send
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._waiting: deque[tuple[Sequence[Row], asyncio.Future[None]]] = deque()
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
        """Send blocks until cancelled."""
        while True:
            await self._filled.wait()
            await self._send_block(self._next_block())
            if not self._waiting:
                self._filled.clear()

    def _next_block(self) -> list[tuple[Sequence[Row], asyncio.Future[None]]]:
        block, count, size = [], 0, 0
        while self._waiting and count < self._max_rows and size < self._max_bytes:
            rows, done = self._waiting.popleft()
            block.append((rows, done))
            count += len(rows)
            size += sum(len(row.token_ids) * _ROW_BYTES for row in rows)
        return block

    async def _send_block(self, block: list[tuple[Sequence[Row], asyncio.Future[None]]]) -> None:
        try:
            rows = [row for group, _ in block for row in group]
            await self._send(record_batch(rows, self._schema))
        except Exception as error:  # whatever went wrong belongs to those who wait for it
            failure = error if isinstance(error, RolloutError) else _lost(error)
            for _, done in block:
                if not done.done():
                    done.set_exception(failure)
        else:
            for _, done in block:
                if not done.done():
                    done.set_result(None)


def _lost(error: Exception) -> RolloutError:
    text = f"the buffer did not confirm the rows: {type(error).__name__}: {error}; finish again"
    return RolloutError(text, None, "buffer_unavailable")
