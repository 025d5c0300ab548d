"""The `paceline` command: parse, call one function, print. No logic lives here."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

__all__ = ["main"]


def main() -> None:
    """Entry point. Turns every failure into one message and the documented exit code.

    0 done · 1 warnings under --strict · 2 the user's input or settings · 3 our own fault ·
    4 the engine · 5 the disk · 130 Ctrl-C.
    """
    from typer.exceptions import TyperException

    from paceline.errors import PacelineError

    try:
        from paceline.cli.app import app

        code = app(standalone_mode=False)
    except PacelineError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("stopped; what was finished is kept, run the same command again to go on", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except TyperException as error:
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    except Exception as error:
        _fail(_keep_fault(error), 3)
    sys.exit(code if isinstance(code, int) else 0)


def _keep_fault(error: Exception) -> str:
    handle, path = tempfile.mkstemp(prefix="paceline-fault-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        traceback.print_exception(error, file=file)
    return (
        f"internal fault ({type(error).__name__}: {error}). This is ours, not yours; "
        f"please report it with {path}"
    )


def _fail(message: str, code: int) -> None:
    print(f"paceline: {message}", file=sys.stderr)
    sys.exit(code)
