"""What tests share: the tokenizer T0 with its templates, and a router and a buffer without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scripted_engine import Engine, ScriptedEngine

from rollout_workers.buffer import Buffer
from rollout_workers.config import PoolConfig
from rollout_workers.router import Router
from rollout_workers.routing import WorkerInfo

Json = dict[str, Any]

# T0: byte-level BPE without a regex or a prefix space. 0-2 are special, 3-258 the bytes.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "Ġ"),
    ("1", "2"),
    ("12", "3"),
    ('"', ":"),
    ("{", '"'),
)
VOCAB_SIZE = 268
END, NEWLINE = 2, 201
# The user's "hi" and the generation prompt.
HI = [1, 87, 85, 71, 84, 201, 74, 75, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
HELLO = [259, 260, 81]  # "hello", as no encoder would split it
SMILE = [175, 256, 250, 227]

_TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + _TURN + "{% endfor %}" + _OPEN
NO_NEWLINE = CHATML.replace(" + '\\n' }}{% endfor", " }}{% endfor")
STRICT = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}" + _TURN + "{% endfor %}" + _OPEN
)
THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>' + '\\n' }}{% endfor %}" + _OPEN
)
FORGETFUL = (  # shows no assistant message but the last
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.index >= loop.length - 1 %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _OPEN
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build_model(directory: Path, template: str | None = CHATML) -> Path:
    """A model directory with T0, a chat template, and weights of no use."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    bpe = models.BPE({symbol: i for i, symbol in enumerate(symbols)}, list(MERGES))
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)
    # For some other types transformers would put a normalizer and a regex into the tokenizer.
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192}
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": END}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 0]}))
    save_file({"w": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


class Local:
    """A plain object whose methods are called as those of an actor handle are."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self.target, name))


@dataclass(frozen=True, slots=True)
class _Method:
    call: Callable[..., Any]

    def remote(self, *args: Any, **named: Any) -> Any:
        return self.call(*args, **named)


def worker(engine: ScriptedEngine | str, name: str = "w0", **fields: Any) -> WorkerInfo:
    """One engine as its worker would publish it."""
    context = 8192 if isinstance(engine, str) else engine.context_length
    known: Json = {
        "name": name,
        "url": engine if isinstance(engine, str) else engine.url,
        "api_key": "key",
        "admin_key": "admin",
        "version": 0,
        "vocab_size": VOCAB_SIZE,
        "context_length": context,
        "max_prompt_tokens": context - 6,
        "max_total_tokens": 32768,
        "node_id": "node",
        "pid": 1,
        "started_at": 0.0,
        "log_path": "",
    }
    return WorkerInfo(**(known | fields))


def config(model: Path, tree: Json | None = None) -> PoolConfig:
    """Settings of a pool that serves ``model``; no front door unless ``tree`` says so."""
    base: Json = {"engine": {"model": str(model), "device": "cpu"}, "router": {}}
    for name, section in (tree or {}).items():
        base[name] = {**base.get(name, {}), **section}
    base["router"].setdefault("http", {"enabled": False})
    return PoolConfig.load(base)


@dataclass(slots=True)
class Rig:
    """A router that runs, with the scripted engines behind it and the buffer after it."""

    router: Router
    buffer: Buffer
    engines: list[ScriptedEngine]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def ask(self, *said: str, session: str | None = None, **body: Any) -> Json:
        """Respond to alternating user and assistant texts."""
        return await self.router.respond({"input": history(*said), **body}, session)

    def prompts(self, number: int = 0) -> list[list[int]]:
        return [body["input_ids"] for body in sent(self.engines[number], "/generate")]

    async def rows(self) -> list[Json]:
        """Everything the buffer holds, as plain values."""
        batch = await self.buffer.take(n=1000)
        return table_rows(batch.table)

    async def idle(self) -> bool:
        """Whether no turn runs and no load is reserved."""
        status = await self.router.status()
        loads = status["load"].values()
        return all(load["requests"] == load["tokens"] == 0 for load in loads)


def history(*said: str) -> list[Json]:
    """Messages of alternating user and assistant texts, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


def text_of(reply: Json) -> str:
    return str(reply["output"][-1]["content"][0]["text"])


def sent(engine: Engine, path: str) -> list[Json]:
    """Bodies that an engine got at ``path``, in order."""
    return [entry["body"] for entry in engine.recorded if entry["path"] == path]


def table_rows(table: pa.Table) -> list[Json]:
    return table.to_pylist()


@asynccontextmanager
async def running(
    settings: PoolConfig, *engines: ScriptedEngine, buffer: Any = None
) -> AsyncIterator[Rig]:
    """A started router over running engines; ``buffer`` stands in front of the real one."""
    router, real = Router(0, settings), Buffer(settings.buffer)
    handle = Local(real) if buffer is None else buffer(Local(real))
    try:
        await real.open(await router.load(), Local(real))
        await router.start(handle)
        await router.set_roster([worker(e, f"w{i}") for i, e in enumerate(engines)], 0)
        yield Rig(router, real, list(engines))
    finally:
        await router.stop()
        await real.stop()


async def until(holds: Callable[[], bool | Awaitable[bool]], within_s: float = 5.0) -> None:
    """Wait until something holds; fails the test if it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            value = holds()
            if await value if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.005)
