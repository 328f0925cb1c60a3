"""Rendering with the model's own chat template, and the ids a conversation grows by.

Owns the tokenizer. Sampled text is never encoded here: a later turn's prompt is made of the
sampled ids plus ``continuation``, the template's text *after* an assistant message, cut out of a
synthetic conversation. Text that spells a control token is encoded as ordinary pieces in any role,
so that no message can close a turn. Spellings of other added tokens, such as ``<think>``, are
ordinary pieces only in what users say; in other roles they are what the template makes of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_workers.errors import BadRequest, ConfigError
from rollout_workers.ledger import Message
from rollout_workers.schema import Ids

_CUT = "\ufdd0"  # a Unicode noncharacter: no tokenizer gives it a meaning
_TRUSTED = ("system", "developer", "assistant")  # their authors may mean a token by its name
_MARK = "qzxkvq"  # stands for the assistant's words in the synthetic conversation
_PROBE = (Message(role="user", content="u"), Message(role="assistant", content=_MARK))


class ChatTemplate:
    """Owns one model's tokenizer and chat template. Thread-safe."""

    def __init__(
        self,
        path: str | Path,
        *,
        trust_remote_code: bool = False,
        options: dict[str, Any] | None = None,
        without_torch: bool = False,
    ) -> None:
        """Load the tokenizer of the model directory ``path``.

        ``without_torch`` keeps transformers from importing torch, which a tokenizer does not need,
        for the life of this process: 0.6 GB and most of the start-up time less.

        Raises:
            ConfigError: there is no tokenizer or no chat template.
        """
        try:
            with _torch_hidden() if without_torch else contextlib.nullcontext():
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(
                    str(path), trust_remote_code=trust_remote_code
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable tokenizer in {path}: {error}") from None
        if not self._tokenizer.chat_template:
            raise ConfigError(f"the model in {path} has no chat template; use an instruct model")
        self.options = options or {}
        self.digest = self._digest()
        self._codec = _Codec(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        control = {number: token.content for number, token in added.items() if token.special}
        # Runs of spaces are added tokens in some vocabularies, and ordinary words nevertheless.
        named = [token.content for token in added.values() if not token.content.isspace()]
        self._control = _spellings(control.values())
        self._added = _spellings([*named, *control.values()])
        self._control_ids = frozenset(control)
        self.bridgeable = self._probe()

    def render(self, messages: Sequence[Message]) -> Ids:
        """Ids of a whole conversation with the generation prompt: ``[num_tokens]`` int32.

        Raises:
            BadRequest: the template refuses the conversation; the message is the template's own.
        """
        return self._encode(self._text(messages))

    def continuation(self, messages: Sequence[Message], last_id: int | None) -> Ids:
        """Ids between a generation that ended with ``last_id`` and the next one.

        Closing tokens (unless ``last_id`` already closes the turn), glue, the new ``messages``
        rendered together, and the generation prompt.
        """
        text = self._text([*_PROBE, *messages])
        ids = self._encode(text[text.index(_MARK) + len(_MARK) :])
        return ids[1:] if len(ids) and last_id == int(ids[0]) else ids

    def decode(self, ids: Sequence[int] | Ids, *, special: bool = False) -> str:
        """Text of ``ids``; incomplete characters become U+FFFD. ``special`` keeps control ids."""
        return self._codec.decode(np.asarray(ids).tolist(), special)

    def _digest(self) -> str:
        parts = [self._tokenizer.chat_template, sorted(self._tokenizer.get_added_vocab().items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _probe(self) -> bool:
        """Whether the template ends an assistant message with a control token and is stable.

        Only then can a conversation go on from sampled ids: a control token keeps the pieces on
        its two sides from merging into other ids.
        """
        tails = [[Message(role="user", content=c)] for c in ("x", "")]
        try:
            closings = {int(self.continuation(tail, None)[0]) for tail in tails}
            longer = [*_PROBE, tails[0][0], Message(role="assistant", content="y"), *tails[0]]
            stable = self._text(longer).count(_MARK) == 1
        except (BadRequest, ValueError, IndexError):
            return False
        return stable and len(closings) == 1 and closings <= self._control_ids

    def _text(self, messages: Sequence[Message]) -> str:
        turns = [{"role": m.role, "content": self._literal(m)} for m in messages]
        try:
            return self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self.options
            )
        except Exception as error:  # jinja's own errors and whatever a template raises
            raise BadRequest(f"the model's chat template refuses this: {error}", "input") from None

    def _literal(self, message: Message) -> str:
        """The content, cut wherever a token would form that must not."""
        if _CUT in message.content:
            raise BadRequest(f"the character U+{ord(_CUT):04X} cannot be used in text", "input")
        return _cut(message.content, self._control if message.role in _TRUSTED else self._added)

    def _encode(self, text: str) -> Ids:
        pieces = map(self._codec.encode, text.split(_CUT))
        return np.fromiter(itertools.chain.from_iterable(pieces), np.int32)


class _Codec:
    """Encodes and decodes as a tokenizer does, without what its wrapper spends. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # the wrapper changes its own state while encoding
        self._backend = _backend(tokenizer)
        self._bytes = None if self._backend is None else _byte_table(self._backend)

    def encode(self, text: str) -> list[int]:
        if self._backend is not None:
            # Unlike ``encode`` it counts no offsets, and lets other threads run.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int], special: bool) -> str:
        if self._bytes is not None and not special:
            with contextlib.suppress(IndexError):  # an id that the tokenizer does not know
                return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=not special)
        return self._tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )


def _backend(tokenizer: Any) -> Any:
    """The tokenizer inside transformers' wrapper where that adds nothing of its own, else None."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    steps = ("encode", "_encode_plus", "decode", "_decode")
    if not all(hasattr(plain, s) and getattr(kind, s, None) is getattr(plain, s) for s in steps):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # as the wrapper does before each call
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _byte_table(backend: Any) -> list[bytes] | None:
    """The bytes of each id where decoding is joining them, control ids left out; else None."""
    from tokenizers import decoders

    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    added = backend.get_added_tokens_decoder()
    control = {token.content for token in added.values() if token.special}
    letters = _byte_letters()
    table = []
    for number in range(max(backend.get_vocab().values()) + 1):
        token = backend.id_to_token(number)
        if token is None or token in control:
            table.append(b"")
        elif all(letter in letters for letter in token):
            table.append(bytes(letters[letter] for letter in token))
        else:
            table.append(token.encode())
    text = backend.decode(list(range(len(table))), skip_special_tokens=True)
    return table if b"".join(table).decode("utf-8", "replace") == text else None


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, others from U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


@contextlib.contextmanager
def _torch_hidden() -> Iterator[None]:
    """Make ``import torch`` fail and its spec unfindable, as if it were not installed."""
    if "torch" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell of no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _cut(text: str, spellings: re.Pattern[str]) -> str:
    """The text with a cut after the first character of each spelling, so that none is left.

    The search goes on right after the cut: a spelling that begins inside another one is cut too.
    """
    pieces, start = [], 0
    while found := spellings.search(text, start):
        pieces.append(text[start : found.start() + 1])
        start = found.start() + 1
    return _CUT.join([*pieces, text[start:]])


def _spellings(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((re.escape(t) for t in tokens if len(t) > 1), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")
