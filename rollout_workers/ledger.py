"""The token ledger of one session: what was sampled, kept by id, and which prompt comes next.

Pure data: no tokenizer, engine or clock. It is a forest of turns; a turn holds only the ids it
adds. A request whose history ends in a known turn *extends* it: its prompt is that turn's exact
ids plus newly rendered messages. Anything else begins a new segment, with a reason on its row.

Worked example: turn 0 prompt ``[1 2 3]`` sampled ``[7 8]``; turn 1 adds ``[4 5]`` and samples
``[9]``. The prompt of turn 1 is ``[1 2 3 7 8 4 5]`` and the one segment is ``[1 2 3 7 8 4 5 9]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

import msgspec
import numpy as np

from rollout_workers.schema import Ids, Logprobs, Mask, Span, TurnRecord

Key = bytes
_Shiftable = TypeVar("_Shiftable", Span, TurnRecord)


class SegmentReason(StrEnum):
    """Why a segment began."""

    START = "start"  # the first request of the session
    HISTORY = "history_mismatch"  # earlier messages differ from what was sent or returned
    TEMPLATE = "template"  # the chat template cannot be continued token by token
    EMPTY = "empty"  # nothing was ever generated
    BRANCH = "branch"  # a second answer to what was asked before


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A canonical chat message: what a chat template renders and history is compared by."""

    role: str
    content: str


def root_key(template_digest: str, options: dict[str, object]) -> Key:
    """Key under which a conversation starts; other templates or options never share a prefix."""
    return _digest(b"", msgspec.json.encode([template_digest, options], order="sorted"))


def chain(key: Key, messages: Sequence[Message]) -> list[Key]:
    """Keys of every prefix of ``messages``; ``chain(k, m)[i]`` covers ``m[: i + 1]``."""
    keys = []
    for message in messages:
        key = _digest(key, msgspec.json.encode([message.role, message.content]))
        keys.append(key)
    return keys


def _digest(parent: Key, payload: bytes) -> Key:
    return hashlib.blake2b(parent + payload, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What an engine returned for one turn. Arrays are ``[num_generated]``.

    ``spans`` and ``record`` count from the first generated token.
    """

    ids: Ids
    logprobs: Logprobs
    spans: tuple[Span, ...]
    record: TurnRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """One committed turn: ids it adds to its parent, first the context, then the generation."""

    parent: int | None
    reason: SegmentReason
    context: Ids
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Plan:
    """How the next prompt is made.

    ``anchor`` is the turn to extend, None for a new segment; ``new_from`` is the index of the
    first message that the ledger does not hold yet; ``key`` covers the whole history.
    """

    anchor: int | None
    reason: SegmentReason
    new_from: int
    key: Key


@dataclass(frozen=True, slots=True)
class Segment:
    """A root-to-leaf path of turn numbers, ready for a row. Arrays are ``[num_tokens]``."""

    path: tuple[int, ...]
    reason: SegmentReason
    token_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    spans: tuple[Span, ...]
    turns: tuple[TurnRecord, ...]
    masked_elsewhere: int


EMPTY_SEGMENT = Segment(
    path=(),
    reason=SegmentReason.EMPTY,
    token_ids=np.empty(0, np.int32),
    loss_mask=np.empty(0, np.uint8),
    logprobs=np.empty(0, np.float32),
    spans=(),
    turns=(),
    masked_elsewhere=0,
)


@dataclass(slots=True)
class Ledger:
    """Owns the turns of one session."""

    turns: list[Turn] = field(default_factory=list)
    _by_key: dict[Key, int] = field(default_factory=dict)
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _asked: set[Key] = field(default_factory=set)  # histories that began a segment

    def plan(self, root: Key, messages: Sequence[Message], bridgeable: bool = True) -> Plan:
        """Match a history against the turns held. Nothing changes until ``commit``."""
        keys = chain(root, messages)
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        anchor = self._by_key.get(keys[last]) if 0 <= last < len(messages) - 1 else None
        if anchor is not None and bridgeable:
            reason = SegmentReason.BRANCH if self._children.get(anchor) else SegmentReason.START
            return Plan(anchor, reason, last + 1, keys[-1])
        if anchor is not None:
            return Plan(None, SegmentReason.TEMPLATE, 0, keys[-1])
        if keys[-1] in self._asked:
            return Plan(None, SegmentReason.BRANCH, 0, keys[-1])
        reason = SegmentReason.HISTORY if self.turns else SegmentReason.START
        return Plan(None, reason, 0, keys[-1])

    def prompt(self, anchor: int) -> Ids:
        """Exact ids of the path that ends with turn ``anchor``: ``[num_tokens]`` int32."""
        return np.concatenate([ids for i in self._path(anchor) for ids in _ids(self.turns[i])])

    def ends_with(self, anchor: int) -> int | None:
        """The last id sampled in turn ``anchor``, None if it sampled nothing."""
        ids = self.turns[anchor].sampled.ids
        return int(ids[-1]) if len(ids) else None

    def commit(self, plan: Plan, context: Ids, sampled: Sampled, reply: Message) -> int:
        """Add a turn whose reply went out as ``reply``; returns its number.

        ``context`` holds the ids between the anchor and the generation: the whole prompt of a new
        segment, else closing and glue tokens and the new messages.
        """
        number = len(self.turns)
        siblings = self._children.setdefault(plan.anchor, [])
        reason = plan.reason
        if plan.anchor is not None and siblings:  # two requests may have extended it meanwhile
            reason = SegmentReason.BRANCH
        self.turns.append(Turn(plan.anchor, reason, context, sampled))
        siblings.append(number)
        if plan.anchor is None:
            self._asked.add(plan.key)
        self._by_key[chain(plan.key, [reply])[-1]] = number
        return number

    def segments(self) -> list[Segment]:
        """All root-to-leaf paths, first continuations first; each turn is trained in exactly one.

        So the trunk comes first, and a branch owns nothing but what it added.
        """
        owned: set[int] = set()
        leaves = [i for i in range(len(self.turns)) if not self._children.get(i)]
        paths = sorted(list(self._path(leaf)) for leaf in leaves)
        return [self._segment(path, owned) for path in paths]

    def _segment(self, path: list[int], owned: set[int]) -> Segment:
        new = [i for i in path if i not in owned]
        parts = [_part(self.turns[i], i in owned) for i in path]
        starts = np.cumsum([0] + [len(ids) for ids, _, _ in parts]).tolist()
        spans, records, elsewhere = [], [], 0
        for i, start in zip(path, starts, strict=False):
            turn = self.turns[i]
            begin = start + len(turn.context)
            spans += [_shift(span, begin) for span in turn.sampled.spans]
            records.append(_shift(turn.sampled.record, begin))
            elsewhere += len(turn.sampled.ids) if i in owned else 0
        owned.update(path)
        ids, mask, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        reason = self.turns[new[0]].reason
        arrays = ids, mask, logprobs
        return Segment(tuple(path), reason, *arrays, tuple(spans), tuple(records), elsewhere)

    def _path(self, turn: int) -> Iterator[int]:
        path = []
        step: int | None = turn
        while step is not None:
            path.append(step)
            step = self.turns[step].parent
        return reversed(path)


def _ids(turn: Turn) -> tuple[Ids, Ids]:
    return turn.context, turn.sampled.ids


def _part(turn: Turn, owned: bool) -> tuple[Ids, Mask, Logprobs]:
    """A turn's ids with its mask and logprobs, both zero where another segment trains it."""
    context, count = len(turn.context), len(turn.sampled.ids)
    mask = np.zeros(context + count, dtype=np.uint8)
    logprobs = np.zeros(context + count, dtype=np.float32)
    if not owned:
        mask[context:] = 1
        logprobs[context:] = turn.sampled.logprobs
    return np.concatenate(_ids(turn)), mask, logprobs


def _shift(item: _Shiftable, by: int) -> _Shiftable:
    return replace(item, start=item.start + by, end=item.end + by)
