"""Two stock SGLang servers with the float32 tiny model, shared by the whole test session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import SPOOLS, wait_gone

from rollout_workers import RolloutPool, models


def tiny_pool(name: str, mark: str, workers: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "engine": {
            "model": "demo:tiny",
            "device": "cpu",
            "dtype": "float32",
            "args": {"max-total-tokens": 16384, "max-running-requests": 32},
            "env": {"RW_TEST_MARK": mark},
        },
        "workers": {"count": workers},
        "buffer": {"directory": SPOOLS.name},
        "ray": {"num_cpus": 2},
    }


@pytest.fixture(scope="session")
def tiny() -> Path:
    return models.resolve("demo:tiny")


@pytest.fixture(scope="session")
def pool() -> Iterator[RolloutPool]:
    mark = uuid.uuid4().hex
    with RolloutPool.start(tiny_pool(f"real-{mark[:8]}", mark, workers=2)) as started:
        yield started
    assert wait_gone(mark) == []
