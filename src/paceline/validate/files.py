"""Rules about the folder itself: which files, of which kind, how many, how large."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from paceline.draft import INDEX_NAME, MASK_EMBEDDING
from paceline.problems import show_value
from paceline.validate.magic import check_magic
from paceline.validate.report import Finding, finding

__all__ = ["HARD_LINK", "MAX_FILES", "check_files", "folder_bytes"]

HARD_LINK = "is a hard link"
MAX_FILES = 64
_MAX_LISTED = 4 * MAX_FILES
_SMALL_BYTES = 1024 * 1024
_ALLOWED = re.compile(
    r"config\.json|spec\.json|metadata\.json|README\.md|LICEN[CS]E([.\-][\w.\-]*)?|\.gitattributes"
    r"|model\.safetensors|model-\d{5}-of-\d{5}\.safetensors|" + re.escape(INDEX_NAME)
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CODE = re.compile(
    r"\.(py|pyc|pyi|so|dll|dylib|sh|bash|bat|exe|js|wasm|ipynb|jinja2?|whl|egg|cu|cpp|c|rs)$", re.I
)
_PICKLE = re.compile(
    r"\.(bin|pt|pth|ckpt|pkl|pickle|npy|npz|joblib|gguf|ggml|h5|hdf5|keras|onnx|msgpack|pb|tar"
    r"|gz|zip|7z|xz|bz2|tgz|zst)$",
    re.I,
)
_TOKENIZER = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.*\.model|.*processor.*\.json|generation_config\.json|chat_template.*|adapter_.*)$",
    re.I,
)
_QUANT = re.compile(r"(quantize_config|hf_quant_config|quant_config)\.json$", re.I)


def _list(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        listed = []
        for entry in entries:
            listed.append(entry)
            if len(listed) > _MAX_LISTED:
                break
    return sorted(listed, key=lambda entry: entry.name)


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of the regular files, at most the first few hundred."""
    total = 0
    for entry in _list(folder):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            total += status.st_size
    return total


def check_files(folder: Path, *, has_weights: bool) -> Iterator[Finding]:
    """All `fs.*` rules that need names, kinds and first bytes only."""
    entries = _list(folder)
    yield from _check_count(len(entries))
    yield from _check_collisions([entry.name for entry in entries])
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as problem:
            message = f"cannot be looked at: {problem.strerror}"
            yield finding(
                "fs.read", entry.name, message, expected="a readable file", fix="Replace it."
            )
            continue
        refused = list(_check_kind(entry.name, status))
        if not refused and entry.name == MASK_EMBEDDING:
            continue  # judged by validate.mask_embedding, by what is in it
        if not refused:
            refused = list(_check_name(entry.name, has_weights))
        yield from refused
        if stat.S_ISREG(status.st_mode):
            yield from _check_content(Path(entry.path), status.st_size)


def _check_count(number: int) -> Iterator[Finding]:
    if number > MAX_FILES:
        yield finding(
            "fs.count",
            "",
            "the folder holds too many files",
            found=f"more than {_MAX_LISTED}" if number > _MAX_LISTED else number,
            expected=f"at most {MAX_FILES}",
            fix="Merge the shards.",
        )


def _check_collisions(names: list[str]) -> Iterator[Finding]:
    """Names that are one name on a disk without case, or one that composes accents."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            same = unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", other)
            yield finding(
                "fs.flat",
                name,
                f"differs from '{show_value(other)}' only in "
                + ("the Unicode form of its letters" if same else "upper and lower case"),
                found=name,
                expected="names that stay distinct on every file system",
                fix="Remove one of the two.",
            )


def _check_kind(name: str, status: os.stat_result) -> Iterator[Finding]:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        yield finding(
            "fs.flat",
            name,
            "is a folder",
            found="a folder",
            expected="a flat folder of files",
            fix="Move its files up, or remove it (a .git folder is not part of a draft).",
        )
    elif stat.S_ISLNK(mode):
        yield finding(
            "fs.type",
            name,
            "is a symbolic link",
            found="a symbolic link",
            expected="a regular file",
            fix="Copy the file itself: `cp -L`.",
        )
    elif not stat.S_ISREG(mode):
        yield finding(
            "fs.type",
            name,
            "is a device, FIFO or socket",
            found=stat.filemode(mode)[0],
            expected="a regular file",
            fix="Remove it.",
        )
    elif status.st_nlink > 1:
        yield finding(
            "fs.type",
            name,
            f"{HARD_LINK}: another name can change it after the check",
            found=f"{status.st_nlink} names for one file",
            expected="a file of its own",
            fix="Copy it: `cp --reflink=never`.",
        )


def _find_code(name: str) -> Finding | None:
    return _refuse("fs.code", name, "code is not part of a draft") if _CODE.search(name) else None


def _find_pickle(name: str) -> Finding | None:
    if not _PICKLE.search(name):
        return None
    message = "pickles, archives and other model formats are not accepted"
    return _refuse("fs.pickle", name, message)


def _find_second_quantization(name: str) -> Finding | None:
    message = "quantization is declared in config.json only"
    return _refuse("fs.quantjson", name, message) if _QUANT.match(name) else None


def _find_tokenizer(name: str) -> Finding | None:
    message = "the target's own tokenizer and settings are used"
    return _refuse("fs.tokenizer", name, message) if _TOKENIZER.match(name) else None


def _refuse(rule: str, name: str, message: str) -> Finding:
    fix = f"Remove '{show_value(name)}'."
    return finding(rule, name, message, found=name, expected="model files only", fix=fix)


def _check_name(name: str, has_weights: bool) -> Iterator[Finding]:
    """`fs.allow`, after the rules for files of one kind; an odd name breaks `fs.flat`."""
    remove = f"Remove '{show_value(name)}'."
    for look in (_find_code, _find_pickle, _find_second_quantization, _find_tokenizer):
        found = look(name)
        if found is not None:
            yield found
            return
    if not _PLAIN_NAME.fullmatch(name) or (name.startswith(".") and name != ".gitattributes"):
        yield finding(
            "fs.flat",
            name,
            _explain_name(name),
            found=name,
            expected="letters, digits, '.', '_' and '-', at most 128, no leading dot",
            fix=remove,
        )
    elif not _ALLOWED.fullmatch(name):
        yield finding(
            "fs.allow",
            name,
            "is not a file of a draft folder",
            found=name,
            expected="config.json, model.safetensors (or numbered shards and their index),"
            " spec.json, metadata.json, README.md, LICENSE",
            fix=remove,
        )
    elif not has_weights and (name == "config.json" or ".safetensors" in name):
        yield finding(
            "fs.allow",
            name,
            "belongs to a draft with weights, but the family has none",
            found=name,
            expected="spec.json, and metadata.json if wanted",
            fix=f"{remove} Or name the right family in spec.json.",
        )


def _explain_name(name: str) -> str:
    if name.startswith("."):
        return "is a hidden file"
    if len(name) > 128:
        return f"has a name of {len(name)} characters"
    if not unicodedata.is_normalized("NFC", name):
        return "has a name that is not in the composed Unicode form (NFC)"
    return "has a file name that is not allowed"


def _check_content(path: Path, size: int) -> Iterator[Finding]:
    """`fs.read`, and what the first bytes and the holes of a file tell."""
    name = path.name
    yield from _check_size(name, size)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        yield finding(
            "fs.read",
            name,
            f"cannot be opened: {problem.strerror}",
            expected="a readable file",
            fix="Give the grader permission to read it.",
        )
        return
    try:
        yield from check_magic(name, handle, size)
        yield from _check_sparse(name, handle, size)
    except OSError as problem:
        message = f"cannot be read: {problem.strerror}"
        yield finding("fs.read", name, message, expected="a readable file", fix="Replace it.")
    finally:
        os.close(handle)


def _check_size(name: str, size: int) -> Iterator[Finding]:
    """`fs.size` of a file that is neither JSON nor weights; those have bounds of their own."""
    if not name.endswith((".json", ".safetensors")) and size > _SMALL_BYTES:
        yield finding(
            "fs.size",
            name,
            f"is too large: {size:,} bytes",
            found=f"{size:,} bytes",
            expected=f"at most {_SMALL_BYTES:,} bytes",
            fix="Shorten it.",
        )


def _check_sparse(name: str, handle: int, size: int) -> Iterator[Finding]:
    held = _held_bytes(handle, size)
    if size > _SMALL_BYTES and held < size // 2:
        yield finding(
            "fs.sparse",
            name,
            f"is a sparse file: {size:,} bytes long, {held:,} bytes of data",
            found=f"{held:,} bytes of data",
            expected=f"{size:,} bytes of data",
            fix="Write the weights out: `cp --sparse=never`.",
        )


def _held_bytes(handle: int, size: int) -> int:
    """Bytes that are not holes, looked at in at most 1,000 pieces."""
    held = position = 0
    for _ in range(1000):
        try:
            data = os.lseek(handle, position, os.SEEK_DATA)
            position = os.lseek(handle, data, os.SEEK_HOLE)
        except OSError:  # ENXIO: nothing but a hole from here on
            return held
        held += position - data
        if position >= size:
            return held
    return size
