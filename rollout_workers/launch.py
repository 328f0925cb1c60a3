"""What an engine is started with: its command line, its environment, its key file.

SGLang's flags pass through from ``engine.args``; those that this package must own, or that would
falsify ids or logprobs, are refused there by name, so that nothing is set twice. Keys go through a
file, since a command line can be read by everyone on the machine. ``check`` finds at once what
SGLang would find minutes later.
"""

from __future__ import annotations

import getpass
import glob
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollout_workers.config import EngineConfig
from rollout_workers.cpu_platform import CPU_ARGS, CPU_ENV, PLATFORM
from rollout_workers.errors import ConfigError, StartFailed

_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
SITE = Path(__file__).with_name("server_site")
_OURS = "the worker sets it; remove it"
_ONE_REPLICA = "an engine is one replica on one node: raise workers.count instead"
_REFUSED = {  # flags of SGLang, and what to do instead
    "model": "set engine.model",
    "model-path": "set engine.model",
    "tp": "set engine.tensor_parallel",
    "tp-size": "set engine.tensor_parallel",
    "tensor-parallel-size": "set engine.tensor_parallel",
    "trust-remote-code": "set engine.trust_remote_code",
    "device": "set engine.device",
    "context-length": "set engine.context_length",
    "host": _OURS,
    "port": _OURS,
    "nccl-port": _OURS,
    "api-key": _OURS,
    "admin-api-key": _OURS,
    "config": _OURS,
    "weight-version": _OURS,
    "incremental-streaming-output": _OURS,
    "allow-auto-truncate": "it cuts prompts silently, and rows would hold ids the model never saw",
    "skip-tokenizer-init": "stop strings and the text of replies need the engine's tokenizer",
    "preferred-sampling-params": "every request sends all of its own; set sampling",
    "dp": _ONE_REPLICA,
    "dp-size": _ONE_REPLICA,
    "data-parallel": _ONE_REPLICA,
    "data-parallel-size": _ONE_REPLICA,
    "nnodes": _ONE_REPLICA,
    "node-rank": _ONE_REPLICA,
    "dist-init-addr": _ONE_REPLICA,
    "nccl-init-addr": _ONE_REPLICA,
}
# With it set, logprobs would be those of temperature 1 while rows name another temperature.
_ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one engine, as decided by its server."""

    model_path: str
    host: str
    port: int
    nccl_port: int
    version: int
    dtype: str | None
    run_dir: Path
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)

    @property
    def key_file(self) -> Path:
        """Where the keys are while the engine runs."""
        return self.run_dir / "keys.yaml"


def check(config: EngineConfig, model: str, surrounding: Mapping[str, str]) -> None:
    """Find what cannot work before anything is started.

    Raises:
        ConfigError: ``engine.args`` or ``engine.env`` sets what is not the user's to set.
        StartFailed: the model is not on this node, or there is no GPU.
    """
    _check_args(config)
    if _ORIGINAL_LOGPROB in config.env:
        raise ConfigError(
            f"engine.env: {_ORIGINAL_LOGPROB} cannot be given here: it makes logprobs those of "
            "temperature 1, whatever tokens were sampled with; remove it"
        )
    if os.path.isabs(model) and not os.path.exists(model):
        raise StartFailed(f"the model cannot be loaded: {model} does not exist on this node")
    if config.device == "cuda":
        _check_gpu({**surrounding, **config.env}.get("CUDA_VISIBLE_DEVICES", "all"))


def command(config: EngineConfig, launch: Launch) -> list[str]:
    """The engine's argv; ``engine.args`` win over the defaults for CPU."""
    soft: dict[str, Any] = {"dtype": launch.dtype, "context-length": config.context_length}
    base = CPU_ARGS if config.device == "cpu" else {}
    user = {_flag(key): value for key, value in config.args.items()}
    flags = {**base, **soft, **user, **_owned(config, launch)}
    start = config.command or [sys.executable, "-m", "sglang.launch_server"]
    return [*start, *_spell(flags.items())]


def environment(
    config: EngineConfig, launch: Launch, surrounding: Mapping[str, str]
) -> dict[str, str]:
    """The engine's environment; ``engine.env`` wins over the defaults for CPU.

    What is surrounding cannot put an engine for GPUs on our platform for CPUs, nor change what
    logprobs mean.
    """
    cpu = CPU_ENV if config.device == "cpu" else {}
    # Its sockets go where they can be removed with the server; compiled kernels must outlive it.
    defaults = {
        "TMPDIR": str(launch.run_dir),
        "TORCHINDUCTOR_CACHE_DIR": surrounding.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
        "PYTHONUNBUFFERED": "1",
    }
    env = {**surrounding, **defaults, **cpu, **config.env}
    if config.device == "cuda" and env.get("SGLANG_PLATFORM") == PLATFORM:
        del env["SGLANG_PLATFORM"]
    env[_ORIGINAL_LOGPROB] = "0"
    rest = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{SITE}{os.pathsep}{rest}" if rest else str(SITE)
    env["ROLLOUT_WORKERS_PARENT"] = str(os.getpid())
    env["ROLLOUT_WORKERS_MAIN"] = "1"
    return env


def write_keys(launch: Launch) -> None:
    """Write the key file so that only its owner can read it, at any moment."""
    keys = {"api-key": launch.api_key, "admin-api-key": launch.admin_key}
    descriptor = os.open(launch.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        yaml.safe_dump(keys, file)


def popen(argv: list[str], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start it in our own process group, which Ray kills with the actor: never a new session.

    Raises:
        StartFailed: there is no such program.
    """
    with log_path.open("ab") as log:
        try:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise StartFailed(f"the engine's command cannot be run: {error}") from None


def _check_args(config: EngineConfig) -> None:
    for flag in map(_flag, config.args):
        # SGLang takes `--flag=value` too, and a flag by its beginning.
        word = flag.partition("=")[0]
        for known, hint in _REFUSED.items():
            if word and known.startswith(word):
                raise ConfigError(f"engine.args: --{flag} cannot be given here: {hint}")


def _check_gpu(visible: str) -> None:
    if visible.strip() in {"", "-1", "NoDevFiles"}:
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}, so this worker was given none"
    elif not any(glob.glob(pattern) for pattern in _GPU_FILES):
        reason = "this node has no GPU device"
    else:
        return
    raise StartFailed(
        f"no GPU for engine.device = cuda: {reason}. Run it where Ray has a GPU to give "
        "(num_gpus), or set engine.device = cpu and a small model"
    )


def _owned(config: EngineConfig, launch: Launch) -> dict[str, Any]:
    return {
        "model-path": launch.model_path,
        "host": launch.host,
        "port": launch.port,
        "nccl-port": launch.nccl_port,
        "tp-size": config.tensor_parallel,
        "weight-version": launch.version,
        "trust-remote-code": config.trust_remote_code,
        "incremental-streaming-output": True,
        "config": launch.key_file,
    }


def _flag(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _spell(flags: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for flag, value in flags:
        if value is None or value is False:
            continue
        yield f"--{flag}"
        if isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            yield json.dumps(value) if isinstance(value, dict) else str(value)
