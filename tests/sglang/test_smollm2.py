"""The small real model: fetched from the package index, converted once, and it answers."""

from __future__ import annotations

import pytest

from rollout_workers import models

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("default"),  # of torch and transformers, not of ours
]


def test_smollm2_knows_the_capital_of_france() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = models.resolve("demo:smollm2")
    info = models.describe(path)
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (49152, 8192, (2,))
    assert info.dtype == "bfloat16"

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1].item() in info.eos_token_ids
