"""One private Ray with one pool of two scripted engines for all tests that do not end it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from pools import scripted, wait_gone

from rollout_workers import RolloutPool, models


@pytest.fixture(scope="module")
def pool() -> Iterator[RolloutPool]:
    mark = uuid.uuid4().hex
    config = scripted(str(models.resolve("demo:tiny")), name=f"pool-{mark[:8]}", mark=mark)
    with RolloutPool.start(config) as started:
        yield started
    assert wait_gone(mark) == []
