"""Reading a draft folder strictly: the first thing that is wrong is raised, nothing is guessed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.draft.check_keys import check_config_keys
from paceline.draft.check_tensors import check_tensors
from paceline.draft.contracts import Contract, build_contract
from paceline.draft.folder import scan_folder
from paceline.draft.mask_embedding import MASK_EMBEDDING
from paceline.draft.quantized import count_parameters
from paceline.draft.taps import check_tapped_layers
from paceline.errors import DraftError
from paceline.hub import fetch_to_cache, is_hub_spec, parse_ref
from paceline.methods import METHODS
from paceline.problems import require_none, without_notes
from paceline.records import sha256_file
from paceline.safetensors_header import Header, TensorInfo
from paceline.target import cache_folder

__all__ = ["Draft", "list_bundled", "read_draft", "resolve_draft"]

_BUNDLED = Path(__file__).parent / "bundled"
_CONTENT = (".json", ".safetensors")
# In a plain config vLLM reads it only when it is given the folder without a target.
_OF_AN_ENVELOPE = ("speculators_config",)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One sound draft folder.

    tensors: by canonical name (`midlayer.*`); tensor_files: canonical name -> file;
    headers: file -> its header. files_bytes: all json and safetensors files. num_parameters:
    numbers that the tensors stand for, maps and scales left out. sha256: over names and contents of
    those files.
    is_native: the target's own MTP head; path is then the target's folder (draft/native.py).
    """

    path: Path
    family: str
    num_speculative_tokens: int
    config: dict[str, Any]
    spec: dict[str, Any]
    metadata: dict[str, Any]
    headers: Mapping[str, Header]
    tensors: Mapping[str, TensorInfo]
    tensor_files: Mapping[str, str]
    files_bytes: int
    num_parameters: int
    sha256: str
    is_native: bool = False

    @property
    def name(self) -> str:
        name = self.metadata.get("name")
        return name if isinstance(name, str) and name else self.path.name


def list_bundled() -> tuple[str, ...]:
    """Names of the drafts that come with the package."""
    if not _BUNDLED.is_dir():
        return ()
    return tuple(sorted(item.name for item in _BUNDLED.iterdir() if (item / "spec.json").is_file()))


def resolve_draft(spec: str) -> Path:
    """A folder, a bundled draft's name, or owner/name@commit, fetched once into the user's cache.

    Raises DraftError for what is none of them, HubError where the Hub does not give it.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if spec in list_bundled():
        return _BUNDLED / spec
    if path.exists():
        raise DraftError("is a file", where=spec, expected="a draft folder")
    if is_hub_spec(spec):
        return fetch_to_cache(parse_ref(spec), cache_folder(), kind="draft")
    names = ", ".join(list_bundled())
    raise DraftError(
        f"there is no draft '{spec}'",
        expected="a folder, owner/name@commit" + (f", or a bundled name: {names}" if names else ""),
        fix="Check the spelling, or train one with `paceline train`.",
    )


def read_draft(path: str | Path, *, by_hand: Mapping[str, Any] | None = None) -> Draft:
    """Reads and checks a folder against its family's contract. Raises DraftError.

    Names, shapes, dtypes, index and JSON must all be right; the vocabulary map's values and the
    fit to a target are checked by `validate`. by_hand: family and num_speculative_tokens of a
    folder without spec.json.
    """
    path = Path(path)
    if not path.is_dir():
        raise DraftError("there is no such draft folder", where=str(path), expected="a folder")
    try:
        scan = scan_folder(path, by_hand=by_hand)
    except OSError as problem:
        raise DraftError(f"cannot be read: {problem.strerror}", where=str(path)) from None
    require_none(without_notes(list(scan.problems)), DraftError, folder=str(path))
    if scan.uncovered is not None:
        raise DraftError(
            f"this is {scan.uncovered}, of which there is no contract here",
            where=str(path),
            expected="a family and form that Paceline serves",
            fix="Serve it with vLLM itself; `paceline validate` says what can be checked.",
        )
    if scan.family == "dflash" and MASK_EMBEDDING in scan.names:
        raise DraftError(
            "is a pickle, which vLLM would read; Paceline gives it none",
            where=f"{path}/{MASK_EMBEDDING}",
            expected="safetensors alone",
            fix="Put its row into an embed_tokens.weight of the draft's own, or serve the folder"
            " with vLLM itself.",
        )
    spec, config = scan.spec or {}, scan.config or {}
    family: str = spec["family"]
    if METHODS[family].has_weights:
        _require_weights(path, scan.config, scan.headers)
    contract = build_contract(family, config)
    if METHODS[family].has_weights:
        for problems in (
            check_config_keys(family, config, skip=_OF_AN_ENVELOPE),
            check_tapped_layers(config) if family == "eagle3" else [],
            check_tensors(contract, scan.tensors_by_file),
        ):
            require_none(without_notes(problems), DraftError, folder=str(path))
    elif scan.config is not None or scan.headers:
        raise DraftError(
            f"family {family} has no weights, but the folder holds config.json or weights",
            where=str(path),
            expected="spec.json alone",
            fix="Remove the other files, or name the right family in spec.json.",
        )
    return _build_draft(path, contract, spec, config, scan.metadata or {}, scan.headers)


def _require_weights(
    path: Path, config: dict[str, Any] | None, headers: Mapping[str, Header]
) -> None:
    for what, name in ((config, "config.json"), (headers, "model.safetensors")):
        if not what:
            raise DraftError(
                f"there is no {name}",
                where=str(path),
                expected="config.json, model.safetensors, spec.json, metadata.json",
                fix="Copy the whole folder; an interrupted download lacks files.",
            )


def _build_draft(
    path: Path,
    contract: Contract,
    spec: dict[str, Any],
    config: dict[str, Any],
    metadata: dict[str, Any],
    headers: Mapping[str, Header],
) -> Draft:
    files = sorted(
        item
        for item in path.iterdir()
        if item.suffix in _CONTENT and item.is_file() and not item.is_symlink()
    )
    tensors = {
        contract.canonical(name): tensor
        for header in headers.values()
        for name, tensor in header.tensors.items()
    }
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{sha256_file(file)}\n".encode())
    return Draft(
        path=path,
        family=contract.family,
        num_speculative_tokens=spec["num_speculative_tokens"],
        config=config,
        spec=spec,
        metadata=metadata,
        headers=headers,
        tensors=tensors,
        tensor_files={
            contract.canonical(name): file
            for file, header in headers.items()
            for name in header.tensors
        },
        files_bytes=sum(file.stat().st_size for file in files),
        num_parameters=count_parameters(tensors, config),
        sha256=digest.hexdigest(),
    )
