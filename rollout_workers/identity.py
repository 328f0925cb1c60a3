"""Who a call is about: session names, and response ids that lead back to their session."""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Mapping
from typing import Any

from rollout_workers.errors import BadRequest, NotFound


def new_response_id(shard: int, session_id: str) -> str:
    """Unique, and it tells shard and session to whoever gets it back."""
    place = base64.urlsafe_b64encode(f"{shard}:{session_id}".encode()).decode()
    return f"resp_{place.rstrip('=')}_{uuid.uuid4().hex[:16]}"


def session_name(session_id: str | None, body: Mapping[str, Any]) -> str | None:
    """The session a call names; two names that disagree are an error."""
    metadata = body.get("metadata")
    inside = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    if session_id is not None and inside is not None and session_id != inside:
        raise BadRequest(
            f"metadata.session_id is {inside!r} but the call names {session_id!r}",
            "metadata.session_id",
        )
    return inside if session_id is None else session_id


def session_of(response_id: str) -> str:
    with contextlib.suppress(ValueError, AttributeError, IndexError):
        place = response_id.split("_")[1:-1]
        text = "_".join(place)
        shard_and_id = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        return shard_and_id.partition(":")[2]
    raise NotFound(f"no response {response_id!r:.100}", "response_id")


def parse_size(text: str | None, param: str) -> int | None:
    """A whole number out of a header."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise BadRequest(f"{param} must be a whole number, got {text!r:.40}", param)
    return int(text[:18])


def parse_flag(text: str | None, param: str) -> bool:
    """``true`` or ``false`` out of a header; absent is true."""
    if text is None:
        return True
    if text.lower() not in ("true", "false"):
        raise BadRequest(f"{param} must be true or false, got {text!r:.40}", param)
    return text.lower() == "true"
