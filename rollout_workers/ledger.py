"""The token ledger of one session: what was sampled, kept by id, and which prompt comes next.

Pure data: no tokenizer, engine or clock. It is a forest of turns; a turn holds only the ids it
adds. A request whose history ends in a known turn *extends* it: its prompt is that turn's exact
ids plus newly rendered messages. Anything else begins a new segment, with a reason on its row.

Worked example: turn 0 prompt ``[1 2 3]`` sampled ``[7 8]``; turn 1 adds ``[4 5]`` and samples
``[9]``. The prompt of turn 1 is ``[1 2 3 7 8 4 5]`` and the one segment is ``[1 2 3 7 8 4 5 9]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
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
    IDS = "ids_mismatch"  # a message carries ids that its turn did not sample
    TEMPLATE = "template"  # the chat template cannot be continued token by token
    EMPTY = "empty"  # nothing was ever generated
    AMBIGUOUS = "ambiguous"  # several answers to one request, and finish named none
    BRANCH = "branch"  # a second answer to what was asked before


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A canonical chat message: what a chat template renders and history is compared by."""

    role: str
    content: str
    item_id: str | None = field(default=None, compare=False)
    """Of an item that we returned and got back: tells siblings with equal words apart."""
    token_ids: tuple[int, ...] | None = field(default=None, compare=False)
    """Generated ids that an assistant message carries; they must be those of its turn."""


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
    key: Key  # of the history it answers


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
    _by_key: dict[Key, list[int]] = field(default_factory=dict)
    _children: dict[int | None, list[int]] = field(default_factory=dict)
    _asked: set[Key] = field(default_factory=set)  # histories that began a segment

    def plan(self, root: Key, messages: Sequence[Message], bridgeable: bool = True) -> Plan:
        """Match a history against the turns held. Nothing changes until ``commit``."""
        keys = chain(root, messages)
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        known = self._by_key.get(keys[last], []) if 0 <= last < len(messages) - 1 else []
        anchor = self._choose(known, messages[last]) if known else None
        if known and anchor is None:
            return Plan(None, SegmentReason.IDS, 0, keys[-1])
        if anchor is not None and bridgeable:
            reason = SegmentReason.BRANCH if self._children.get(anchor) else SegmentReason.START
            return Plan(anchor, reason, last + 1, keys[-1])
        if anchor is not None:
            return Plan(None, SegmentReason.TEMPLATE, 0, keys[-1])
        if keys[-1] in self._asked:
            return Plan(None, SegmentReason.BRANCH, 0, keys[-1])
        reason = SegmentReason.HISTORY if self.turns else SegmentReason.START
        return Plan(None, reason, 0, keys[-1])

    def _choose(self, known: list[int], message: Message) -> int | None:
        """Which of the turns that said the same is meant; None if none has the ids it carries."""
        if message.token_ids is not None:
            carried = np.asarray(message.token_ids, dtype=np.int64)
            known = [i for i in known if np.array_equal(self.turns[i].sampled.ids, carried)]
        named = [i for i in known if item_id(self.turns[i].sampled.record) == message.item_id]
        return next(reversed(named or known), None)

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
        reason = plan.reason  # of when it was planned: other turns may have come since
        if plan.key in self._asked or (plan.anchor is not None and siblings):
            reason = SegmentReason.BRANCH
        elif plan.anchor is None and self.turns and reason is SegmentReason.START:
            reason = SegmentReason.HISTORY
        self.turns.append(Turn(plan.anchor, reason, context, sampled, plan.key))
        siblings.append(number)
        if plan.anchor is None:
            self._asked.add(plan.key)
        self._by_key.setdefault(chain(plan.key, [reply])[-1], []).append(number)
        return number

    def excluded(self, final: int | None = None) -> set[int]:
        """Turns that are not trained, because another answer to the same request counts.

        Of several answers to one request those count that were continued; if none was, the one
        that ``final`` names; if it names none, none: nobody can tell which one was acted on.
        """
        answers: dict[tuple[int | None, Key], list[int]] = {}
        for number, turn in enumerate(self.turns):
            answers.setdefault((turn.parent, turn.key), []).append(number)
        dropped: set[int] = set()
        for group in answers.values():
            if len(group) > 1:
                dropped |= {i for i in group if not self._children.get(i) and i != final}
        return dropped

    def segments(self, excluded: Collection[int] = ()) -> list[Segment]:
        """All root-to-leaf paths but for ``excluded`` turns; each turn is trained in exactly one.

        First continuations come first: so the trunk does, and a branch owns only what it added.
        """
        owned: set[int] = set()
        parents = {t.parent for i, t in enumerate(self.turns) if i not in excluded}
        leaves = [i for i in range(len(self.turns)) if i not in parents and i not in excluded]
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
        reason = self.turns[new[0]].reason
        if not owned and reason is SegmentReason.BRANCH:  # of a turn that was excluded
            reason = SegmentReason.START
        owned.update(path)
        ids, mask, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        arrays = ids, mask, logprobs
        return Segment(tuple(path), reason, *arrays, tuple(spans), tuple(records), elsewhere)

    def _path(self, turn: int) -> Iterator[int]:
        path = []
        step: int | None = turn
        while step is not None:
            path.append(step)
            step = self.turns[step].parent
        return reversed(path)


def item_id(record: TurnRecord) -> str:
    """Id of the output message of a response."""
    return "msg_" + record.response_id.removeprefix("resp_")


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
