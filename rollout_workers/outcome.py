"""What callers say of a session: its declaration at the start, its outcome at the end. Pure.

Whatever is wrong about it is refused here, so that no session becomes impossible to finish.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rollout_workers.config import IDENTIFIER
from rollout_workers.errors import BadRequest, Conflict
from rollout_workers.fields import is_unicode

Json = dict[str, Any]
STATUSES = ("completed", "length", "aborted", "error")

_IDENTIFIER = re.compile(IDENTIFIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a caller said a session is. Unset fields leave what an earlier call said."""

    group_id: str | None = None
    group_size: int | None = None
    record: bool = True
    metadata: Json = field(default_factory=dict)

    def merge(self, new: Declaration) -> Declaration:
        """This and a later declaration together.

        Raises:
            BadRequest: a value is wrong. Conflict: the two disagree.
        """
        group_id = _agree(self.group_id, new.group_id, "group_id")
        size = _agree(self.group_size, new.group_size, "group_size")
        if group_id is not None:
            check_identifier(group_id, "group_id")
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and 1 <= size < 2**31):
            raise BadRequest(
                f"group_size must be a whole number above 0 and below 2**31, got {size!r:.40}",
                "group_size",
            )
        if size is not None and group_id is None:
            raise BadRequest("group_size needs a group_id", "group_id")
        if not isinstance(new.metadata, Mapping):
            raise BadRequest("metadata must be an object", "metadata")
        metadata = {**self.metadata, **new.metadata}
        _json(metadata)
        return Declaration(
            group_id=group_id,
            group_size=size,
            record=self.record and new.record,
            metadata=metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What ``finish`` was told. Equal outcomes are the same call."""

    reward: float | None = None
    turn_rewards: tuple[float, ...] | None = None
    status: str | None = None
    metadata: str = "{}"
    response_id: str | None = None
    error: str | None = None

    @classmethod
    def of(
        cls,
        declared: Declaration,
        reward: Any = None,
        turn_rewards: Any = None,
        status: Any = None,
        metadata: Any = None,
        response_id: Any = None,
        error: Any = None,
    ) -> Outcome:
        """Check what a caller said about the end of a session.

        Raises:
            BadRequest: a value is wrong.
        """
        if status is not None and status not in STATUSES:
            raise BadRequest(f"status must be one of {', '.join(STATUSES)}", "status")
        if turn_rewards is not None and not isinstance(turn_rewards, list | tuple):
            raise BadRequest("turn_rewards must be a list of numbers", "turn_rewards")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise BadRequest("metadata must be an object", "metadata")
        return cls(
            reward=None if reward is None else _number(reward, "reward"),
            turn_rewards=None
            if turn_rewards is None
            else tuple(_number(r, f"turn_rewards[{i}]") for i, r in enumerate(turn_rewards)),
            status=status,
            metadata=_json({**declared.metadata, **(metadata or {})}),
            response_id=_text(response_id, "response_id"),
            error=_text(error, "error"),
        )


def check_identifier(value: Any, param: str) -> None:
    """Raise ``BadRequest`` unless ``value`` is 1-128 of letters, digits and ``._:-``."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise BadRequest(f"{param} must be 1-128 of A-Z a-z 0-9 . _ : -, got {value!r:.80}", param)


def _number(value: Any, param: str) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        if number and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        raise BadRequest(f"{param} is too large", param) from None
    raise BadRequest(f"{param} must be a finite number, got {value!r:.40}", param)


def _text(value: Any, param: str) -> str | None:
    if value is not None and not (isinstance(value, str) and is_unicode(value)):
        raise BadRequest(f"{param} must be a string of Unicode text", param)
    return value


def _json(metadata: Json) -> str:
    if not metadata:
        return "{}"
    try:
        text = json.dumps(metadata, ensure_ascii=False, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"metadata must be JSON: {error}", "metadata") from None
    if not is_unicode(text):
        raise BadRequest("metadata holds half of a surrogate pair", "metadata")
    return text


def _agree(old: Any, new: Any, param: str) -> Any:
    if old is not None and new is not None and old != new:
        raise Conflict(f"{param} was {old!r} before and is {new!r:.80} now", param)
    return old if new is None else new
