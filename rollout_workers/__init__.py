"""A pool of SGLang servers on Ray that an RL trainer treats as one policy.

Importing this package is light: Ray, SGLang and torch are imported by the parts that need them.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_workers.buffer import Batch
    from rollout_workers.config import PoolConfig
    from rollout_workers.pool import RolloutPool

__version__ = "0.1.0"
__all__ = ["Batch", "PoolConfig", "RolloutPool", "__version__"]

# Under `uv run` Ray would start every worker through uv, in a copy of the project and outside the
# actor's process group. Ray reads this when it is imported; an operator's own choice stands.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

_HOMES = {"Batch": "buffer", "PoolConfig": "config", "RolloutPool": "pool"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
