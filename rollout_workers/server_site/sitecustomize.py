"""Makes each Python of a server die with its parent, from its first moment.

SGLang's processes ask for this themselves, but only once they have imported everything: a parent
that is killed before that leaves them behind, with the GPU. Python runs this module before
anything else. It arms the server's main process and its spawned ``multiprocessing`` children; other
helpers (compile workers, resource trackers) may be started from threads that end, which would
fire the signal, and go by themselves when their pipe closes. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

PARENT = "ROLLOUT_WORKERS_PARENT"  # pid of the nearest ancestor that ran this module or set it
MAIN = "ROLLOUT_WORKERS_MAIN"  # set for the server's main process only
PR_SET_PDEATHSIG = 1


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _arm(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel signals only deaths after the call above: look whether it came too late.
    if os.getppid() != parent and _gone(parent):
        os._exit(128 + signal.SIGKILL)


def _publish() -> None:
    os.environ[PARENT] = str(os.getpid())


def _chain() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _run() -> None:
    parent = os.environ.get(PARENT)
    main = os.environ.pop(MAIN, None)
    if parent and (main or "--multiprocessing-fork" in sys.orig_argv):
        _arm(int(parent))
    if parent:
        _publish()
        os.register_at_fork(after_in_child=_publish)
    _chain()


if __name__ == "sitecustomize":
    _run()
