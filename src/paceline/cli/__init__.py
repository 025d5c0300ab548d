"""The `paceline` command: parse, call one function, print. No logic lives here."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import tempfile
import traceback

__all__ = ["main"]

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG)
_FULL_TEXT = "No space left on device"
_FREE_SPACE = "Free some space and run the same command again."
_STOPPED = "stopped; what was finished is kept, run the same command again to go on"


def main() -> None:
    """Entry point. Turns every failure into one message and the documented exit code.

    0 done · 1 warnings under --strict · 2 the user's input or settings · 3 our own fault ·
    4 the engine · 5 the disk · 6 the network or the Hub · 130 Ctrl-C.
    """
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _tell(_STOPPED, 130)
    except BrokenPipeError:
        code = 141
    except OSError as error:
        code = _tell(_explain(error), 5) if error.errno in _DISK else _tell(_keep_fault(error), 3)
    except Exception as error:
        if _FULL_TEXT in str(error):  # from a library that has no error of its own for it
            code = _tell(f"the disk is full ({error}). {_FREE_SPACE}", 5)
        else:
            code = _tell(_keep_fault(error), 3)
    if code in (5, 141):  # what standard output still holds cannot be written: leave it
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run() -> int:
    from typer.exceptions import TyperException

    from paceline.cli.app import app
    from paceline.errors import PacelineError

    rooms = logging.getLogger("paceline")  # what a room tells of long work, as lines
    rooms.addHandler(logging.StreamHandler())
    rooms.setLevel(logging.INFO)
    try:
        code = app(standalone_mode=False)
    except PacelineError as error:
        return _tell(str(error), error.exit_code)
    except TyperException as error:
        error.show()  # type: ignore[attr-defined]
        return 2
    if code == 130:  # typer's own answer to Ctrl-C
        _tell(_STOPPED, 130)
    return code if isinstance(code, int) else 0


def _explain(error: OSError) -> str:
    from paceline.errors import StorageError
    from paceline.records import storage_errors

    try:
        with storage_errors(error.filename or "standard output"):
            raise error
    except StorageError as problem:
        return str(problem)


def _keep_fault(error: Exception) -> str:
    text = f"internal fault ({type(error).__name__}: {error}). This is ours, not yours; please"
    try:
        handle, path = tempfile.mkstemp(prefix="paceline-fault-", suffix=".txt")
        with os.fdopen(handle, "w") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return f"{text} report it (its trace could not be kept: the temporary folder is full)"
    return f"{text} report it with {path}"


def _tell(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"paceline: {message}", file=sys.stderr)
    return code
