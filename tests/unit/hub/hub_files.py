"""The files of a small repository, for the tests of this folder."""

from __future__ import annotations

__all__ = ["FILES", "WEIGHTS"]

WEIGHTS = bytes(range(256)) * 3000  # 768,000 bytes
FILES = {
    "config.json": b'{"model_type": "llama"}\n',
    "spec.json": b'{"family": "eagle3", "num_speculative_tokens": 3}\n',
    "model.safetensors": WEIGHTS,
}
