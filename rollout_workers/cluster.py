"""Which Ray a process uses: the one it joined, one it was pointed to, or a private one.

A private Ray has a temporary directory and a token of its own, and leaves a note under the pool's
name so that other processes of this user find it; an old cluster's leftovers are never joined.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import ray

from rollout_workers.config import RayConfig
from rollout_workers.errors import Conflict, NotFound, RolloutError, StartFailed
from rollout_workers.node import node_dir
from rollout_workers.processes import ProcessId, identify

NAMESPACE = "rollout_workers"
_PREFIX, _OWNER = "rw-ray-", "driver.json"
_TRIES = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Note:
    """How to reach the private Ray that a pool's driver started."""

    address: str
    token_path: str
    driver: ProcessId


class PrivateRay:
    """Owns a local Ray, its temporary directory, and the notes that lead to it."""

    def __init__(self, config: RayConfig, pool: str) -> None:
        found = find(pool)
        if found is not None:
            raise Conflict(
                f"a pool named {pool!r} runs already on this machine (driver {found.driver.pid}): "
                f"stop it with `rollout-workers stop {pool}`, or choose another name"
            )
        driver = identify(os.getpid())
        assert driver is not None
        self._temporary = config.temp_dir is None
        self._directory = config.temp_dir or _new_directory(driver)
        self._environment = dict(os.environ)
        token = self._directory / "token"
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        _authenticate(_token(str(token)))
        try:
            self._init(config.num_cpus)
        except StartFailed:
            raise  # its logs stay for whoever reads the message
        except BaseException:
            self._clean()
            raise
        address = ray.get_runtime_context().gcs_address
        note = Note(address, str(token), driver)
        self._note = _note_path(pool)
        self._note.write_text(json.dumps(asdict(note)))
        self._note.chmod(0o600)
        atexit.register(self.close)

    def _init(self, num_cpus: int | None) -> None:
        """Start Ray; it gives its processes 30 s, which a busy machine may exceed."""
        for attempt in range(_TRIES):
            with warnings.catch_warnings():
                # Ray drops the handles of its processes when a start fails.
                warnings.simplefilter("ignore", ResourceWarning)
                cause = self._try(num_cpus)
                if cause is None:
                    return
                gc.collect()
            _log.warning("ray.start_failed try=%d cause=%s", attempt + 1, cause)
        raise StartFailed(
            f"Ray did not start in {_TRIES} tries: {cause}. Is the machine overloaded or its disk "
            f"full? Ray's logs are in {self._directory}"
        ) from None

    def _try(self, num_cpus: int | None) -> str | None:
        """Start Ray once; returns why it failed, with nothing of it left."""
        try:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._directory),
            )
        except Exception as error:  # Ray raises plain ones here
            ray.shutdown()
            for child in psutil.Process().children():  # shutdown knows only a Ray that did start
                with contextlib.suppress(psutil.Error):
                    if any(str(self._directory) in word for word in child.cmdline()):
                        child.kill()
            return str(error)
        return None

    def close(self) -> None:
        """End Ray and remove its files."""
        atexit.unregister(self.close)
        self._note.unlink(missing_ok=True)
        ray.shutdown()
        self._clean()

    def _clean(self) -> None:
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)
        _authenticate(self._environment)


def _new_directory(driver: ProcessId) -> Path:
    """A directory for one Ray; those that killed drivers left behind are removed on the way.

    Short, for Ray puts unix sockets, of at most 107 characters, below it.
    """
    for owner in Path("/tmp").glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if not ProcessId(**json.loads(owner.read_text())).alive:
                shutil.rmtree(owner.parent, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    (directory / _OWNER).write_text(json.dumps(asdict(driver)))
    return directory


def join(config: RayConfig, pool: str) -> PrivateRay | None:
    """Use the Ray of this process or its job, else start a private one and return its owner.

    Raises:
        RolloutError: the cluster that was asked for cannot be joined.
    """
    if ray.is_initialized():
        return None
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        return PrivateRay(config, pool)
    _connect(address)
    return None


def reach(pool: str, address: str | None = None) -> None:
    """Join the cluster in which ``pool`` may run, if this process has joined none.

    Raises:
        NotFound: there is nothing to join.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    note = None if address else find(pool)
    if note is not None:
        _authenticate(_token(note.token_path))
        address = note.address
    if address is None:
        raise NotFound(
            f"no pool named {pool!r} was started on this machine, and no cluster is named: give "
            "its address (--address, RAY_ADDRESS), or start one with `rollout-workers serve CONFIG`"
        )
    _connect(address)


def pools() -> list[str]:
    """Names of the pools that run in private Rays of this user on this machine."""
    names = sorted(path.stem for path in node_dir("pools").glob("*.json"))
    return [name for name in names if find(name) is not None]


def find(pool: str) -> Note | None:
    """The note of a pool whose driver lives; a dead driver's note is removed."""
    path = _note_path(pool)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads(path.read_text())
        note = Note(fields["address"], fields["token_path"], ProcessId(**fields["driver"]))
        if note.driver.alive:
            return note
        path.unlink(missing_ok=True)
    return None


def _connect(address: str) -> None:
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray raises its own, grpc's and plain ones
        raise RolloutError(
            f"cannot join Ray at {address}: {type(error).__name__}: {error}. Is the head up, and "
            "do RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH match the cluster's?",
            None,
            "cluster_unreachable",
        ) from None


def _authenticate(environment: Mapping[str, str]) -> None:
    """Set Ray's authentication variables; Ray read them when it was imported and must do so again.

    ``ray._raylet`` is not public; its names are those of the Ray release that this package pins.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _token(path: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


def _note_path(pool: str) -> Path:
    return node_dir("pools") / f"{pool}.json"
