"""Stock SGLang on CPU, without an AMX build: an out-of-tree platform on plain torch.

SGLang finds ``activate`` through the entry point ``rollout_workers_cpu`` of the group
``sglang.srt.platforms``. The platform applies only where ``SGLANG_PLATFORM`` names it, so that the
package changes nothing for servers on GPUs. Importing this module does not import sglang.
"""

from __future__ import annotations

import functools
import os
from typing import Final

PLATFORM = "rollout_workers_cpu"

CPU_ENV: Final[dict[str, str]] = {
    "SGLANG_PLATFORM": PLATFORM,
    # With more threads every small parallel region waits for a descheduled one: 20-30x slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # on a GPU host, keep the server off the GPUs
}

CPU_ARGS: Final[dict[str, object]] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.2,  # of the machine's memory; a ceiling, the next line decides
    "max-total-tokens": 32768,
    "max-running-requests": 64,
    "sleep-on-idle": True,  # without it an idle server keeps a core busy for good
    "skip-server-warmup": True,
}
"""SGLang flags without the dashes. ``dtype`` depends on the model: see ``models.ModelInfo``."""


def activate() -> str | None:
    """The dotted path of the platform class where SGLang was told to use it, else None."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return f"{__name__}.CpuPlatform"


def __getattr__(name: str) -> object:
    """Define ``CpuPlatform`` on first use: its base classes live in sglang."""
    if name == "CpuPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """A CPU that SGLang treats as a foreign device, so each fused op takes its torch path."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

    return CpuPlatform
