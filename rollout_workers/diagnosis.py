"""Why an engine ended, from its log: one sentence that begins with the cause.

A start-up failure of SGLang is hundreds of lines whose cause is one of them, often not the last.
Only lines that report an error are looked at, since healthy logs mention GPUs and ports as well.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What kind of failure it was; the value is how the sentence begins."""

    FLAGS = "SGLang refuses its command line"
    PORT = "a port was taken by another program"
    MEMORY = "out of memory"
    GPU = "no usable GPU"
    MODEL = "the model cannot be loaded"
    KILLED = "the engine was killed, often because the machine ran out of memory"
    OTHER = "the engine failed"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause, and the engine's own line about it."""

    cause: Cause
    line: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.line}"


_SIGNS = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        (Cause.FLAGS, r"error: (unrecognized arg|argument |ambiguous option|the following arg)"),
        (Cause.PORT, r"address already in use|EADDRINUSE|error while attempting to bind"),
        (
            Cause.MEMORY,
            r"out of memory|OutOfMemory|not enough memory|can't allocate memory|"
            r"cannot allocate memory|MemoryError",
        ),
        (
            Cause.GPU,
            r"no NVIDIA driver|No CUDA GPUs|no CUDA-capable device|not compiled with CUDA|"
            r"invalid device ordinal|'torch\.device' object has no attribute|No HIP GPUs|"
            r"CUDA driver version is insufficient|Can't initialize NVML",
        ),
        (
            Cause.MODEL,
            r"Repo id must|does not appear to have a file named|not a valid model identifier|"
            r"couldn't connect to|Can't load|Unrecognized model|LocalEntryNotFound|GatedRepo|"
            r"RepositoryNotFound|Safetensor|Cannot find any model weights|FileNotFoundError|"
            r"are not supported for now",
        ),
    )
)
_STAMP = r"^(?:\[[^]]*\] *)?"
_RAISED = re.compile(rf"{_STAMP}[\w.]*(?:Error|Exception|NotFound)\b")
_ERROR = re.compile(rf"\berror: |\bERROR\b|{_RAISED.pattern}|\[Errno|\bFailed\b")
_NOISE = re.compile(
    rf"^\s*$|^\s+|{_STAMP}(?:Traceback|server_args=)|Warning|warnings\.warn|^usage:|"
    r"^During handling of|^The above exception"
)
_LONGEST = 400


def diagnose(lines: Sequence[str], returncode: int | None = None) -> Diagnosis:
    """Find the cause in the last lines of a log; ``returncode`` is None while it still runs."""
    errors = [line for line in lines if _ERROR.search(line) and not _NOISE.search(line)]
    for cause, sign in _SIGNS:
        if found := next(filter(sign.search, errors), None):
            return Diagnosis(cause, _clean(found))
    if raised := [line for line in errors if _RAISED.search(line)]:
        return Diagnosis(Cause.OTHER, _clean(raised[-1]))
    killed = returncode == -signal.SIGKILL
    return Diagnosis(Cause.KILLED if killed else Cause.OTHER, " | ".join(_last(lines, 3)))


def last_line(lines: Sequence[str]) -> str:
    """The last line that says something, or words for there being none."""
    return _last(lines, 1)[-1]


def ended(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None:
        return "still runs"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _last(lines: Sequence[str], count: int) -> list[str]:
    said = [line for line in lines if not _NOISE.search(line)]
    return [_clean(line) for line in said[-count:]] or ["(the log is empty)"]


def _clean(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."
