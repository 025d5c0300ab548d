"""The target's own MTP head as a draft: no folder of its own, its weights are in the target's."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from paceline.draft.contracts import build_contract
from paceline.draft.mtp import build_mtp_config
from paceline.draft.read import Draft
from paceline.errors import DraftError
from paceline.safetensors_header import Header, TensorInfo, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.target import TargetFacts

__all__ = ["NATIVE", "read_native_draft"]

NATIVE = "native"  # its name on the command line
_BLOCK_BYTES = 1 << 20


def read_native_draft(target: TargetFacts, *, num_speculative_tokens: int = 3) -> Draft:
    """The head that is served when a speculative config names method mtp and no model.

    files_bytes: of its tensors alone; sha256: over their names and bytes. Raises DraftError for a
    target without a head, or whose head is not the one vLLM builds.
    """
    config = build_mtp_config(target)
    contract = build_contract("mtp", config, target)
    found: dict[str, tuple[Path, Header, TensorInfo]] = {}
    for file in sorted(target.path.glob("*.safetensors")):
        header = read_header(file, error=DraftError)
        for name, tensor in header.tensors.items():
            if name.startswith("mtp."):
                found[name] = (file, header, tensor)
    required = {name for name, rule in contract.tensors.items() if rule.required}
    missing = sorted(required - set(found))
    if missing:
        raise DraftError(
            f"the target's own MTP head lacks tensor '{missing[0]}'",
            where=str(target.path),
            expected=f"{len(required)} tensors named mtp.*",
            fix="Use the target's full checkpoint, or another draft.",
        )
    digest = hashlib.sha256()
    for name, (file, _, tensor) in sorted(found.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        with open(file, "rb") as reader:
            reader.seek(tensor.start)
            left = tensor.end - tensor.start
            while left and (block := reader.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
    tensors = {name: tensor for name, (_, _, tensor) in found.items()}
    return Draft(
        path=target.path,
        family="mtp",
        num_speculative_tokens=num_speculative_tokens,
        config=config,
        spec={"family": "mtp", "num_speculative_tokens": num_speculative_tokens},
        metadata={"name": f"native MTP head of {target.name}"},
        headers={file.name: header for file, header, _ in found.values()},
        tensors=tensors,
        tensor_files={name: file.name for name, (file, _, _) in found.items()},
        files_bytes=sum(tensor.end - tensor.start for tensor in tensors.values()),
        num_parameters=sum(tensor.num_elements for tensor in tensors.values()),
        sha256=digest.hexdigest(),
        is_native=True,
    )
