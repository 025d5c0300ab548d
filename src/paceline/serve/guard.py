"""A process that ends with its parent: python -m paceline.serve.guard MODULE ARGUMENTS.

Runs a module, unmodified, as the leader of its session; when the process that started it is gone
(killed with -9, say), it kills its whole process group. A Python process that this one spawns
imports this file again (as `__mp_main__`) and watches in turn, so that none of them outlives the
front, whichever is killed first.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

__all__ = ["end_group_with_parent", "main"]

_LOOK_S = 0.5


def end_group_with_parent() -> None:
    """Kills this process's group once its parent has gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="guard").start()


def main() -> None:
    del sys.argv[0]  # what is left is the module and its own arguments
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ in ("__main__", "__mp_main__"):
    end_group_with_parent()
if __name__ == "__main__":
    main()
