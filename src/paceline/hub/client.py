"""The way to the Hub: huggingface_hub, with time limits, and its failures as our messages.

The token comes from HF_TOKEN or the Hub's own store. It goes into request headers and nowhere
else: no message, log, record or redirect to another host carries it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

from paceline.errors import HubError
from paceline.problems import show_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

__all__ = ["Hub", "TransientHubError", "ask", "hub_errors", "open_hub"]

_DEFAULT_ENDPOINT = "https://huggingface.co"
_CONNECT_S, _ANSWER_S = 20.0, 120.0
_WAITS_S = (1.0, 2.0, 4.0)
_MAX_WAIT_S = 60.0  # a longer wait is the user's to decide
_T = TypeVar("_T")


class TransientHubError(HubError):
    """The network or the Hub has to recover; the same request may go well later."""

    exit_code = 6

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        fix: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(what, where=where, expected=expected, fix=fix)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class Hub:
    """An open way to one Hub. headers: authorization for plain requests."""

    endpoint: str
    has_token: bool
    api: HfApi = field(repr=False)
    headers: dict[str, str] = field(repr=False)


def open_hub() -> Hub:
    """Endpoint from HF_ENDPOINT, token from HF_TOKEN or `hf auth login`. Asks nothing yet.

    Raises HubError for an endpoint that is no address, a token that cannot be one, and where
    HF_HUB_OFFLINE forbids the network.
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # lazily

    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s@]+(/[^\s@]*)?", endpoint):
        raise HubError("HF_ENDPOINT is not the address of a Hub", expected="https://host")
    if is_offline_mode():
        raise HubError(
            "the Hub may not be asked: HF_HUB_OFFLINE is set",
            fix="Unset it, or name a folder on this machine.",
        )
    token = get_token()
    if token is not None and not re.fullmatch(r"[!-~]{1,512}", token):
        raise HubError(
            "the Hub token holds characters that no token has",
            expected="hf_ and letters and digits",
            fix="Set HF_TOKEN again, or run `hf auth login`.",
        )
    _prepare_client()
    return Hub(
        endpoint=endpoint,
        has_token=token is not None,
        api=HfApi(endpoint=endpoint, token=token or False, library_name="paceline"),
        headers=build_hf_headers(token=token or False, library_name="paceline"),
    )


@functools.cache
def _prepare_client() -> None:
    """Once a process: time limits, and no bars or lines of huggingface_hub's own."""
    import httpx
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # lazily

    # its warnings name signed addresses; our errors say what happened
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
    set_client_factory(lambda: httpx.Client(follow_redirects=True, timeout=timeout))


def ask(hub: Hub, where: str, request: Callable[[], _T]) -> _T:
    """Makes one request that may be made twice; waits out short troubles and rate limits."""
    for wait_s in (*_WAITS_S, None):
        try:
            with hub_errors(hub, where):
                return request()
        except TransientHubError as problem:
            pause_s = problem.retry_after_s or wait_s
            if wait_s is None or pause_s is None or pause_s > _MAX_WAIT_S:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def hub_errors(hub: Hub, where: str) -> Iterator[None]:
    """Turns whatever huggingface_hub raises into one HubError; other errors pass through."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HubError:
        raise
    except RuntimeError as problem:
        # huggingface_hub says which upload failed and keeps the reason as the cause
        if isinstance(problem.__cause__, (HfHubHTTPError, httpx.HTTPError, ValueError)):
            with hub_errors(hub, where):
                raise problem.__cause__ from None
        raise
    except HfHubHTTPError as problem:
        _raise_refusal(problem, hub, where)
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise TransientHubError(
            f"the Hub at {hub.endpoint} cannot be reached ({_reason(problem)})",
            where=where,
            fix="Check the network and HF_ENDPOINT, then run the same command again; what was"
            " transferred is kept.",
        ) from None
    except (HFValidationError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise HubError(
            f"the Hub's answer is not what its API promises ({type(problem).__name__})",
            where=where,
            fix="Check HF_ENDPOINT.",
        ) from problem


def _reason(problem: Exception) -> str:
    """The kind of failure without addresses, which may be signed."""
    text = re.sub(r"https?://\S+", "…", str(problem)).strip()
    return show_text(text[:120]) if text else type(problem).__name__


def _raise_refusal(problem: HfHubHTTPError, hub: Hub, where: str) -> NoReturn:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    status = problem.response.status_code
    said = show_text((problem.server_message or "").strip()[:300])
    what, fix, rule = f"the Hub refused with status {status}: {said or 'no reason given'}", "", ""
    if isinstance(problem, RevisionNotFoundError):
        what, rule = "the repository has no such commit", "repo.moved"
        fix = "Check the 40 digits; a commit that was rewritten away is gone."
    elif isinstance(problem, EntryNotFoundError):
        what, rule = "a listed file is not there any more", "repo.moved"
        fix = "Run the same command again."
    elif status in (401, 403, 404):
        rule = "repo.access"
        what, fix = _explain_access(problem, hub, said)
    elif status in (409, 412):
        what = f"the repository changed meanwhile: {said or 'conflict'}"
        fix = "Run the same command again."
    elif status == 429:
        header = problem.response.headers.get("Retry-After", "")
        raise TransientHubError(
            "the Hub limits how often it may be asked, and the limit is reached",
            where=where,
            fix="Wait some minutes and run the same command again; what was transferred is kept.",
            retry_after_s=float(header) if re.fullmatch(r"\d{1,6}", header) else None,
        ) from None
    elif status >= 500:
        raise TransientHubError(
            f"the Hub is in trouble (status {status})",
            where=where,
            fix="Run the same command again later; what was transferred is kept.",
        ) from None
    raise HubError(what, where=where, fix=fix, rule=rule) from None


def _explain_access(problem: HfHubHTTPError, hub: Hub, said: str) -> tuple[str, str]:
    """`repo.access`: (what is wrong, what to do) of a 401, 403 or 404."""
    from huggingface_hub.errors import DisabledRepoError, GatedRepoError, RepositoryNotFoundError

    status = problem.response.status_code
    token_fix = (
        "Use a token of an account that has access (HF_TOKEN or `hf auth login`)."
        if hub.has_token
        else "Set HF_TOKEN, or run `hf auth login`."
    )
    if isinstance(problem, GatedRepoError):
        who = "this account has not been let in" if hub.has_token else "no token was given"
        return (
            f"the repository is gated and {who}",
            f"Ask its owner for access on its page. {token_fix}",
        )
    if isinstance(problem, DisabledRepoError):
        return "the Hub has disabled this repository", ""
    if status == 401 and hub.has_token and "credential" in said.lower():
        return "the Hub does not know this token", token_fix
    if isinstance(problem, RepositoryNotFoundError) or status in (401, 404):
        seen = "this token may not see it" if hub.has_token else "it is private"
        return f"there is no such repository, or {seen}", f"Check the name. {token_fix}"
    return (
        f"this token may not do that: {said or 'forbidden'}",
        "Use a token with write access to that owner.",
    )
