"""The pickle inside a file of torch.save, walked without running it: one tensor, or a dict of them.

pickletools decodes the opcodes; nothing is imported and nothing is called. Three functions may be
named, and what they would build is worked out here. Source of the form: torch/serialization.py and
torch/_utils.py of 2.13, protocol 2.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import DraftError
from paceline.problems import show_value

__all__ = ["SavedTensor", "parse_pickle"]

MAX_PICKLE_BYTES = 64 * 1024
_MAX_OPCODES = 4_000
_MAX_NUMBER = 2**40
_STORAGES = {
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch DoubleStorage": "F64",
}
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_DICT = "collections OrderedDict"
_GLOBALS = {*_STORAGES, _TENSOR, _PARAMETER, _DICT}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_PUT, _GET = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
_PLACE = re.compile(r"cpu|cuda(:\d{1,2})?")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A contiguous tensor in one storage. key: its member `data/KEY`; start: its first element
    there; num_stored: elements of the whole storage; place: the device that it was saved from."""

    dtype: str
    shape: tuple[int, ...]
    key: str
    start: int
    num_stored: int
    place: str


@dataclass(frozen=True, kw_only=True)
class _Global:
    name: str


@dataclass(frozen=True, kw_only=True)
class _Storage:
    dtype: str
    key: str
    place: str
    size: int


_MARK = object()


def parse_pickle(data: bytes) -> SavedTensor | dict[str, Any]:
    """What the pickle would be: a tensor, or a dict of tensors and plain values by name.

    Raises DraftError, which says what else is in it.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise DraftError(f"its pickle has {len(data):,} bytes")
    walk = _Walk()
    number = 0
    try:
        for opcode, argument, at in pickletools.genops(data):
            number += 1
            if number > _MAX_OPCODES or (number == 1) != (opcode.name == "PROTO"):
                raise DraftError("its pickle does not begin, or does not end, as torch.save's does")
            if opcode.name == "STOP" and at != len(data) - 1:
                raise DraftError("its pickle has bytes after its end")
            walk.take(opcode.name, argument)
    except DraftError:
        raise
    except (ValueError, IndexError, TypeError, OverflowError):
        raise DraftError("its pickle is broken") from None
    return walk.finish()


class _Walk:
    """The stack and the memo of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.filled: list[dict[str, Any]] = []
        self.hooks: list[dict[str, Any]] = []  # empty ones, given to tensors

    def take(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self.stack.append(argument)
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise DraftError(f"its pickle names '{show_value(argument, limit=60)}'")
            self.stack.append(_Global(name=argument))
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name == "EMPTY_DICT":
            self.stack.append({})
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            self.stack.append(tuple(self._pop_marked()))
        elif name in _PUT:
            self.memo[argument] = self._top()
        elif name in _GET:
            if argument not in self.memo:
                raise DraftError("its pickle is broken")
            self.stack.append(self.memo[argument])
        elif name == "BINPERSID":
            self.stack.append(_find_storage(self._pop(1)[0]))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            built = _build(function, arguments)
            if isinstance(built, SavedTensor):
                self.hooks.append(arguments[-1])
            self.stack.append(built)
        elif name == "SETITEM":
            self._fill(self._pop(2))
        elif name == "SETITEMS":
            self._fill(self._pop_marked())
        elif name == "PROTO":
            if argument != 2:
                raise DraftError(f"its pickle is of protocol {argument}, not 2")
        elif name != "STOP":
            raise DraftError(f"its pickle uses {name}, which no saved tensor needs")

    def finish(self) -> SavedTensor | dict[str, Any]:
        if len(self.stack) != 1:
            raise DraftError("its pickle leaves more than one thing")
        (value,) = self.stack
        if any(part is not value for part in self.filled) or any(
            part is value for part in self.hooks
        ):
            raise DraftError("its pickle holds a dict inside another thing")
        if isinstance(value, SavedTensor) or (isinstance(value, dict) and value):
            return value
        raise DraftError("its pickle is neither a tensor nor a dict of tensors")

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise DraftError("its pickle is broken")
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        if len(taken) < count or any(item is _MARK for item in taken):
            raise DraftError("its pickle is broken")
        del self.stack[-count:]
        return taken

    def _pop_marked(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                taken = self.stack[at + 1 :]
                del self.stack[at:]
                return taken
        raise DraftError("its pickle is broken")

    def _fill(self, items: Sequence[Any]) -> None:
        into = self._top()
        if not isinstance(into, dict) or len(items) % 2:
            raise DraftError("its pickle is broken")
        for key, value in zip(items[::2], items[1::2], strict=True):
            plain = value is None or isinstance(value, (str, int, float, SavedTensor))
            if not isinstance(key, str) or not plain or key in into:
                raise DraftError("its pickle holds more than tensors and plain values by name")
            into[key] = value
        if all(part is not into for part in self.filled):
            self.filled.append(into)


def _is_count(value: Any, *, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= _MAX_NUMBER


def _find_storage(told: Any) -> _Storage:
    if isinstance(told, tuple) and len(told) == 5:
        word, kind, key, place, size = told
        if (
            word == "storage"
            and isinstance(kind, _Global)
            and kind.name in _STORAGES
            and isinstance(key, str)
            and isinstance(place, str)
            and _PLACE.fullmatch(place)
            and _is_count(size, low=1)
        ):
            return _Storage(dtype=_STORAGES[kind.name], key=key, place=place, size=size)
    raise DraftError("its pickle stores something else than floats of 16, 32 or 64 bits")


def _build(function: Any, arguments: Any) -> Any:
    name = function.name if isinstance(function, _Global) else ""
    if not isinstance(arguments, tuple):
        raise DraftError("its pickle is broken")
    if name == _DICT and arguments == ():
        return {}
    if name == _PARAMETER and len(arguments) == 3:
        tensor, _, hooks = arguments
        if isinstance(tensor, SavedTensor) and hooks == {}:
            return tensor
    if name == _TENSOR and len(arguments) == 6:
        storage, start, shape, strides, has_gradient, hooks = arguments
        if isinstance(storage, _Storage) and isinstance(has_gradient, bool) and hooks == {}:
            return _build_tensor(storage, start, shape, strides)
    raise DraftError("its pickle calls a function otherwise than torch.save does")


def _build_tensor(storage: _Storage, start: Any, shape: Any, strides: Any) -> SavedTensor:
    if (
        not _is_count(start)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or not 0 <= len(shape) == len(strides) <= 4
        or not all(_is_count(size, low=1) for size in shape)
        or start + math.prod(shape) > storage.size
    ):
        raise DraftError("its tensor does not lie inside its storage")
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if not _is_count(stride) or (size > 1 and stride != step):
            raise DraftError("its tensor is not contiguous")
        step *= size
    return SavedTensor(
        dtype=storage.dtype,
        shape=shape,
        key=storage.key,
        start=start,
        num_stored=storage.size,
        place=storage.place,
    )
