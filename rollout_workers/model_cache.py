"""The cache of demo models: built once, published by one rename, checked whole on every use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_workers.errors import ModelNotFound

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Told in a few words what is being done now."""

Build = Callable[[Path, Progress], None]

MANIFEST = "rollout_workers_manifest.json"


def default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "rollout_workers" / "models"


def cached(name: str, target: Path, build: Build, progress: Progress | None) -> Path:
    """``target``, built first unless an intact one is there; one process builds, others wait."""
    if _damage(target) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _shown(progress) as say, _locked(target, say):
            damage = _damage(target)  # again: another process may have built it meanwhile
            if damage is None:
                return target
            if target.exists():
                logger.warning("%s in %s is damaged (%s); building it again", name, target, damage)
            _publish(target, build, say)
    except OSError as error:
        raise ModelNotFound(
            f"{name} could not be built in {target.parent}: {error}. Make room or make it "
            "writable, or set XDG_CACHE_HOME to another directory"
        ) from error
    return target


def _damage(directory: Path) -> str | None:
    """What differs from the manifest, or None. Hashing 269 MB takes 0.2 s, so all is hashed."""
    try:
        for name, (size, digest) in json.loads((directory / MANIFEST).read_text()).items():
            path = directory / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _sha256(path) != digest:
                return f"{name} has changed"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(target: Path, build: Build, say: Progress) -> None:
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of a killed build: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=target.parent) as temp:
        fresh = Path(temp, "fresh")
        fresh.mkdir()
        build(fresh, say)
        manifest = {file.name: (file.stat().st_size, _sha256(file)) for file in fresh.iterdir()}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if target.exists():
            target.rename(Path(temp, "damaged"))
        fresh.rename(target)


@contextmanager
def _locked(target: Path, say: Progress) -> Iterator[None]:
    """One builder per model. The kernel drops the lock however the holder ends."""
    with target.with_name(f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {target.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    """The caller's progress, or a spinner on a terminal, or plain lines."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield lambda step: print(step, file=sys.stderr, flush=True)
