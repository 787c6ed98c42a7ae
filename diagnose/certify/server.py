"""`fp8rl certify --server URL`: does a token's log-probability depend on what else a running server computes?"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx

from fp8rl.diagnose.certify.api import Server
from fp8rl.diagnose.certify.http import Http, NoServer, Refused, ServerFailed, TimeUp
from fp8rl.diagnose.certify.openai_api import OpenAI
from fp8rl.diagnose.certify.probe import Probe, Way
from fp8rl.diagnose.certify.prompts import Writer
from fp8rl.diagnose.certify.server_report import ServerReport
from fp8rl.diagnose.certify.sglang_api import SGLang
from fp8rl.numerics.errors import UserError, user_error

_DAY_S = 86400.0


def certify_server(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    *,
    seconds: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> ServerReport:
    """Ask a server for the same answers in every way, for at most `seconds`.

    Raises:
        UserError: there is no such server, it refuses the key, has no such model, or gives no log-probabilities.
    """
    began = time.monotonic()
    if not 0 < seconds <= _DAY_S:  # NaN, too
        raise user_error(
            "--seconds",
            found=seconds,
            expected=f"seconds, at most {_DAY_S:,.0f}",
            remedy="Give fewer, or leave it out.",
        )
    http = Http(_base(url), _key(api_key), seconds)
    try:
        server = _connect(http, url, model)
        ways: dict[str, Way] = {}
        try:
            writer = Writer(server)
            server.look_at_cache(writer.prompt(writer.ids(48)))
            for way in Probe(server, writer, say).ways():
                ways[way.name] = way
        except (TimeUp, Refused, ServerFailed) as error:
            why = f"the time of {seconds:g} s was over" if isinstance(error, TimeUp) else str(error)
            ways.setdefault("alone", Way("alone", "repetition", "not reached", why=why))
        return ServerReport(
            url=url,
            api=server.api,
            model=server.model,
            isolates=server.isolates,
            chunk=server.chunk,
            ways=list(ways.values()),
            seconds=round(time.monotonic() - began, 1),
        )
    except NoServer as error:
        raise user_error(
            "--server",
            found=f"nothing that answers at {url} ({error})",
            expected="a server that runs",
            remedy="Start it, or correct the address.",
        ) from None
    finally:
        http.close()


def _key(api_key: str | None) -> str | None:
    """The key, if a header can hold it. Raises `UserError`."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise user_error(
            "--api-key",
            found="one with other characters than printable ASCII",
            expected="a key that a header can hold",
            remedy="Correct it; a file that it is read from may end in a newline.",
        )
    return api_key


def _base(url: str) -> str:
    """The address before `/v1`."""
    try:
        parsed = urlsplit(url)
        port = parsed.port  # which raises where it is none
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise _no_address(url, str(error)) from None
    if parsed.scheme not in ("http", "https") or not parsed.hostname or port == 0:
        raise _no_address(url, "no http address")
    return url.rstrip("/").removesuffix("/v1")


def _no_address(url: str, why: str) -> UserError:
    return user_error(
        "--server",
        found=f"{url}: {why}",
        expected="an address like http://127.0.0.1:30000",
        remedy="Correct it.",
    )


def _connect(http: Http, url: str, model: str | None) -> Server:
    """The server by the API that it has: with `/v1` in the address, OpenAI's; else SGLang's where it has it."""
    try:
        server: Server | None = None
        if not url.rstrip("/").endswith("/v1"):
            server = SGLang.found(http, model)
        server = server or OpenAI.found(http, model)
    except TimeUp:
        raise user_error(
            "--server",
            found=f"{url}, which does not answer in time",
            expected="an answer",
            remedy="Give it --seconds.",
        ) from None
    except (Refused, ServerFailed) as error:
        raise user_error(
            "--server", found=f"{url}, which fails: {error}", expected="completions", remedy="Look at its log."
        ) from None
    if server is None:
        raise user_error(
            "--server",
            found=f"{url}, which has neither /generate nor /v1/models",
            expected="a server with SGLang's API or OpenAI's completions",
            remedy="Correct the address.",
        )
    return server
