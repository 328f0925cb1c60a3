"""Models by name: which local directory ``demo:tiny``, a path or a Hugging Face id stands for.

A name resolves to a directory that stock SGLang and transformers load, or to ``ModelNotFound``
saying what was looked for and what to do. Demo models need no model hub: they are built once on
this machine, published into the user's cache by one rename and checked on every use.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_workers.demo_models import DEMO_MODELS, recipe
from rollout_workers.errors import ModelNotFound
from rollout_workers.model_cache import Progress, cached, default_cache

logger = logging.getLogger(__name__)

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
        key, build = recipe(name)
        return cached(name, (cache_dir or default_cache()) / key, build, progress)
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
