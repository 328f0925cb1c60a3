"""What an engine is started with, on which ports, and what its log says when it fails."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from rollout_workers.config import EngineConfig
from rollout_workers.cpu_platform import PLATFORM
from rollout_workers.diagnosis import Cause, diagnose, ended, last_line
from rollout_workers.errors import ConfigError, StartFailed
from rollout_workers.launch import SITE, Launch, check, command, environment, write_keys
from rollout_workers.ports import PortLease, is_free

# Command line, environment, keys


def a_launch(tmp_path: Path) -> Launch:
    return Launch(
        model_path="/models/m",
        host="127.0.0.1",
        port=20001,
        nccl_port=20002,
        version=3,
        dtype="float32",
        run_dir=tmp_path,
        api_key="secret-1",
        admin_key="secret-2",
    )


def flags_of(argv: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            flags[word] = values = []
        elif flags:
            values.append(word)
    return flags


def test_command_line(tmp_path: Path) -> None:
    args = {
        "mem-fraction-static": 0.5,
        "enable_metrics": True,
        "disable-radix-cache": False,
        "lora-paths": ["a", "b"],
        "json-model-override-args": {"k": 1},
        "quantization": None,
    }
    config = EngineConfig(device="cuda", tensor_parallel=2, context_length=64, args=args)
    argv = command(config, a_launch(tmp_path))
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert flags_of(argv) == {
        "--dtype": ["float32"],
        "--context-length": ["64"],
        "--mem-fraction-static": ["0.5"],
        "--enable-metrics": [],
        "--lora-paths": ["a", "b"],
        "--json-model-override-args": ['{"k": 1}'],
        "--model-path": ["/models/m"],
        "--host": ["127.0.0.1"],
        "--port": ["20001"],
        "--nccl-port": ["20002"],
        "--tp-size": ["2"],
        "--weight-version": ["3"],
        "--incremental-streaming-output": [],
        "--config": [str(tmp_path / "keys.yaml")],
    }
    assert not any("secret" in word for word in argv)


def test_on_cpu_the_users_flags_win_and_can_be_taken_away(tmp_path: Path) -> None:
    args = {"max-total-tokens": 4096, "sleep-on-idle": False}
    flags = flags_of(command(EngineConfig(device="cpu", args=args), a_launch(tmp_path)))
    assert flags["--max-total-tokens"] == ["4096"]
    assert flags["--device"] == ["cpu"]
    assert "--sleep-on-idle" not in flags


def test_another_command_gets_the_same_flags(tmp_path: Path) -> None:
    config = EngineConfig(device="cuda", command=["sglang", "serve"])
    argv = command(config, a_launch(tmp_path))
    assert argv[:2] == ["sglang", "serve"] and "--model-path" in argv


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("port", "the worker sets it"),
        ("--tp_size", "engine.tensor_parallel"),
        ("api-key", "remove it"),
        ("api-ke", "remove it"),
        ("port=5", "the worker sets it"),
        ("context-length", "set engine.context_length"),
        ("allow_auto_truncate", "cuts prompts silently"),
        ("allow-auto", "cuts prompts silently"),
        ("skip-tokenizer-init", "stop strings"),
        ("preferred-sampling-params", "set sampling"),
        ("dp", "workers.count"),
        ("dp-size", "workers.count"),
        ("data-parallel-size", "workers.count"),
        ("nnodes", "workers.count"),
        ("node-rank", "workers.count"),
        ("dist-init-addr", "workers.count"),
        ("nccl-init-addr", "workers.count"),
    ],
)
def test_a_flag_that_is_not_the_users_is_refused_by_name(flag: str, hint: str) -> None:
    config = EngineConfig(device="cpu", args={flag: 1})
    with pytest.raises(ConfigError, match=hint) as raised:
        check(config, "m", {})
    assert flag.lstrip("-").replace("_", "-") in str(raised.value)


def test_environment(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", env={"OMP_NUM_THREADS": "3", "X": "1"})
    env = environment(config, a_launch(tmp_path), {"PYTHONPATH": "/a", "HOME": "/h", "X": "0"})
    assert env["PYTHONPATH"] == f"{SITE}{os.pathsep}/a"
    assert (env["HOME"], env["X"], env["OMP_NUM_THREADS"]) == ("/h", "1", "3")
    assert env["TMPDIR"] == str(tmp_path) and env["SGLANG_PLATFORM"]
    assert env["ROLLOUT_WORKERS_PARENT"] == str(os.getpid())
    # Compiled kernels stay where they are found again, not in the server's own directory.
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tempfile.gettempdir()}/torchinductor_")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logprobs_always_mean_what_tokens_were_sampled_from(device: str, tmp_path: Path) -> None:
    name = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    config = EngineConfig.model_validate({"device": device, "env": {name: "1"}})
    with pytest.raises(ConfigError, match=rf"^engine\.env: {name} cannot be given"):
        check(config, "m", {})
    launch = a_launch(tmp_path)
    assert environment(config, launch, {name: "1"})[name] == "0"
    assert environment(EngineConfig(), launch, {})[name] == "0"


def test_an_engine_for_gpus_is_not_put_on_the_platform_for_cpus(tmp_path: Path) -> None:
    launch, config = a_launch(tmp_path), EngineConfig(device="cuda")
    assert "SGLANG_PLATFORM" not in environment(config, launch, {"SGLANG_PLATFORM": PLATFORM})
    env = environment(config, launch, {"SGLANG_PLATFORM": "someone_elses"})
    assert env["SGLANG_PLATFORM"] == "someone_elses"


def test_keys_do_not_show(tmp_path: Path) -> None:
    assert "secret" not in repr(a_launch(tmp_path))


def test_keys_are_in_a_file_for_the_owner_only(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    write_keys(launch)
    assert stat.S_IMODE(launch.key_file.stat().st_mode) == 0o600
    keys = yaml.safe_load(launch.key_file.read_text())
    assert keys == {"api-key": "secret-1", "admin-api-key": "secret-2"}


def test_a_missing_model_or_gpu_is_found_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"^the model cannot be loaded: /no/such does not exist"):
        check(EngineConfig(device="cpu"), "/no/such", {})
    with pytest.raises(StartFailed, match=r"^no GPU .* given none.*engine.device = cpu"):
        check(EngineConfig(device="cuda"), str(tmp_path), {"CUDA_VISIBLE_DEVICES": ""})


# Ports


def test_ports_are_distinct_free_and_given_back(tmp_path: Path) -> None:
    lease = PortLease(tmp_path, 2)
    assert len(set(lease.ports)) == 2
    assert all(20000 <= port < 32768 and is_free(port) for port in lease.ports)
    lease.release()
    lease.release()
    assert lease.ports == () and list(tmp_path.iterdir()) == []


def test_a_bound_or_reserved_port_is_not_chosen(tmp_path: Path) -> None:
    first = PortLease(tmp_path, 1, 21000, 21002)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", next(p for p in range(21000, 21003) if p not in first.ports)))
        second = PortLease(tmp_path, 1, 21000, 21002)
        assert not {*first.ports, taken.getsockname()[1]} & {*second.ports}
        with pytest.raises(StartFailed, match="fewer than 1 ports"):
            PortLease(tmp_path, 1, 21000, 21002)
    first.release()
    second.release()


CONTENDER = """
import sys, time
from pathlib import Path
from rollout_workers.ports import PortLease
for _ in range(20):
    lease = PortLease(Path(sys.argv[1]), 2, 22000, 22024)
    print(time.monotonic(), *lease.ports, end=" ")
    time.sleep(0.01)
    print(time.monotonic())
    lease.release()
"""


def test_processes_that_start_together_never_share_a_port(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CONTENDER, str(tmp_path)]
    contenders = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    held: dict[int, list[tuple[float, float]]] = {}
    for contender in contenders:
        out, _ = contender.communicate(timeout=60)
        assert contender.returncode == 0
        for line in out.splitlines():
            begin, first, second, end = line.split()
            assert first != second
            for port in (first, second):
                held.setdefault(int(port), []).append((float(begin), float(end)))
    assert sum(map(len, held.values())) == 8 * 20 * 2
    for spans in map(sorted, held.values()):
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


# Failures in words; the lines are from logs of SGLang 0.5.23

TRACEBACK = [
    "/usr/lib/python3/site-packages/x.py:1: UserWarning: No CUDA GPUs are available",
    "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='/m', port=1, api_key='k')",
    "Traceback (most recent call last):",
    '  File "launch_server.py", line 60, in <module>',
    "    raise RuntimeError(message)",
]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["usage: sglang serve [-h]", "sglang serve: error: unrecognized arguments: --x 1"],
         Cause.FLAGS),
        (["sglang serve: error: argument --tp-size: invalid int value: 'two'"], Cause.FLAGS),
        (["[2026-01-01 00:00:00] ERROR:    [Errno 98] error while attempting to bind on address"
          " ('127.0.0.1', 20001): address already in use"], Cause.PORT),
        (["torch.distributed.DistNetworkError: The server socket has failed to listen on any local"
          " network address. port: 2, useIpv6: false, code: -98, name: EADDRINUSE, message:"
          " address already in use"], Cause.PORT),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."], Cause.MEMORY),
        (["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."],
         Cause.MEMORY),
        (["AttributeError: 'torch.device' object has no attribute 'split'"], Cause.GPU),
        (["RuntimeError: Found no NVIDIA driver on your system."], Cause.GPU),
        (["OSError: Repo id must use alphanumeric chars, '-', '_' or '.': '/nope'."], Cause.MODEL),
        (["ValueError: Unrecognized model in /m. Should have a `model_type` key"], Cause.MODEL),
        (["ValueError: Currently only ['fa3'] attention backends are supported for"
          " deterministic inference"], Cause.OTHER),
    ],
)  # fmt: skip
def test_the_cause_is_found_in_the_log(lines: list[str], cause: Cause) -> None:
    found = diagnose([*TRACEBACK, *lines, "", "[rank0] Exiting"], 1)
    assert found.cause is cause
    assert str(found) == f"{cause}: {lines[-1]}"


def test_without_an_error_the_last_lines_are_told() -> None:
    lines = ["Load weight begin.", "", "  indented"]
    assert str(diagnose(lines, 3)) == "the engine failed: Load weight begin."
    assert diagnose(lines, -9).cause is Cause.KILLED
    assert diagnose([], None) == diagnose([" "], 0)
    assert last_line(lines) == "Load weight begin." and last_line([]) == "(the log is empty)"
    assert [ended(None), ended(-9), ended(1)] == [
        "still runs", "ended by SIGKILL", "ended with exit code 1",
    ]  # fmt: skip


def test_healthy_lines_are_no_error() -> None:
    assert diagnose(TRACEBACK[:2], None).cause is Cause.OTHER


# The start-up hook


def test_the_hook_runs_the_sitecustomize_that_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.chained = __name__")
    env = os.environ | {"PYTHONPATH": f"{SITE}{os.pathsep}{tmp_path}"}
    argv = [sys.executable, "-c", "import sys; print(sys.chained)"]
    out = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("sitecustomize\n", "")


def test_a_server_whose_owner_is_gone_already_ends_at_once() -> None:
    env = os.environ | {"PYTHONPATH": str(SITE), "ROLLOUT_WORKERS_MAIN": "1"}
    env["ROLLOUT_WORKERS_PARENT"] = str(2**22 - 1)
    out = subprocess.run([sys.executable, "-c", "print('ran')"], env=env, capture_output=True)
    assert (out.returncode, out.stdout) == (137, b"")
