"""The certificate of a running server, `fp8rl certify --server URL`: does a token's log-probability depend on what else
the server computes? `dump` judges recorded answers. Nothing here needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl_certify.api import Server, Writer
from fp8rl_certify.apis import OpenAI, SGLang
from fp8rl_certify.errors import UserError, shown, user_error
from fp8rl_certify.http import Http, NoServer, Refused, ServerFailed, TimeUp
from fp8rl_certify.probe import Cause, Probe, ProbeResult
from fp8rl_certify.report import Report, shown_number

Verdict = Literal["certified", "broken", "undecided"]
_STYLES = {"equal": "green", "differs": "bold red", "absent": "dim", "not reached": "yellow"}
_BREAKS: dict[Cause, str] = {
    "repetition": "the same request once more",
    "cached prefix": "a prefix from the cache",
    "batch": "what else is in the batch",
    "prefill": "prefilling what was decoded",
    "chunked prefill": "where chunks of a long prompt begin",
    "load": "other work at the same time",
}
_DAY_S = 86400.0


@dataclass(frozen=True)
class ServerReport(Report):
    """The findings on a server. Its JSON has these keys, and `schema`, `ok`, `verdict` and `breaks`."""

    url: str
    api: str
    """The server's API: SGLang or OpenAI."""
    model: str
    isolates: bool
    """Whether each way began with an empty cache."""
    chunk: int | None
    """Number of tokens that the server prefills at once; None: the server does not say."""
    ways: list[ProbeResult]
    """The results of the ways, in the order in which they were tried."""
    seconds: float
    """Duration of all requests."""

    @property
    def ok(self) -> bool:
        return self.verdict == "certified"

    @property
    def verdict(self) -> Verdict:
        """The verdict: broken if a way differs; certified if no way differs and none of this server's was left out."""
        outcomes = {way.outcome for way in self.ways}
        if "differs" in outcomes:
            return "broken"
        compared = "equal" in outcomes and any(way.found and way.found.size.max is not None for way in self.ways)
        return "certified" if compared and "not reached" not in outcomes else "undecided"

    @property
    def breaks(self) -> list[Cause]:
        """The causes of differences, each once."""
        return list(dict.fromkeys(way.cause for way in self.ways if way.outcome == "differs"))

    def derived(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "breaks": self.breaks}


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
        UserError: no server answers at `url`, or it refuses the key, lacks the model, or gives no log-probabilities.
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
        ways: dict[str, ProbeResult] = {}
        try:
            writer = Writer(server)
            server.look_at_cache(writer.prompt(writer.ids(48)))
            for way in Probe(server, writer, say).ways():
                ways[way.name] = way
        except (TimeUp, Refused, ServerFailed) as error:
            why = f"the time of {seconds:g} s was over" if isinstance(error, TimeUp) else str(error)
            ways.setdefault("alone", ProbeResult("alone", "repetition", "not reached", why=why))
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
    """Return the key. Raises `UserError` if a header cannot hold it."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise user_error(
            "--api-key",
            found="one with other characters than printable ASCII",
            expected="a key that a header can hold",
            remedy="Correct it; a file that it is read from may end in a newline.",
        )
    return api_key


def _base(url: str) -> str:
    """Return the part of the address before `/v1`."""
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
        "--server", found=f"{url}: {why}", expected="an address like http://127.0.0.1:30000", remedy="Correct it."
    )


def _connect(http: Http, url: str, model: str | None) -> Server:
    """Return the server with its API: OpenAI's if the address has `/v1`, else SGLang's if the server has it."""
    try:
        server: Server | None = None
        if not url.rstrip("/").endswith("/v1"):
            server = SGLang.found(http, model)
        server = server or OpenAI.found(http, model)
    except TimeUp:
        raise user_error(
            "--server", found=f"{url}, which does not answer in time", expected="an answer", remedy="Raise --seconds."
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


def rendered(report: ServerReport) -> RenderableType:
    """Render the verdict, a line for each way, and the first difference of each cause."""
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(("the same answers", "", "differing", "|d| mean", "max", "cached")):
        table.add_column(heading, justify="right" if index >= 2 else "left", overflow="fold")
    notes = []
    for way in report.ways:
        outcome = Text(way.outcome, style=_STYLES[way.outcome])
        numbers = ("", "", "", "")
        if way.found is not None:
            size, share = way.found.size, f"{way.found.differing:,} of {way.found.tokens:,}"
            cached = "" if way.cached is None else f"{way.cached:,}"
            numbers = (share, shown_number(size.mean), shown_number(size.max), cached)
        table.add_row(way.name, outcome, *numbers)
        if way.why:
            some = "" if way.found is None else f"asked with {way.found.answers} of its prompts, then "
            notes.append(f"{way.name}: {some}{way.why}")
    for cause in report.breaks:
        way = next(way for way in report.ways if way.cause == cause and way.outcome == "differs")
        if way.found is not None and (first := way.found.first) is not None:
            tokens = " and ".join(shown(token, 60) for token in dict.fromkeys(first.tokens)) or "the end"
            values = " against ".join("none" if value is None else f"{value!r}" for value in first.logprobs)
            notes.append(f"{way.name}: first at prompt {first.prompt}, token {first.position}: {tokens}, {values}")
    start = "each way began with an empty cache" if report.isolates else "its cache could not be emptied between ways"
    chunk = f"chunks of {report.chunk} tokens" if report.chunk else "it does not say how long its chunks are"
    verdict, style = {
        "certified": ("a row depends on nothing but itself, bit for bit, in every way below", "bold green"),
        "broken": (f"answers change with {', '.join(_BREAKS[cause] for cause in report.breaks)}", "bold red"),
        "undecided": ("no difference was found, but not every way was reached", "bold yellow"),
    }[report.verdict]
    return Group(
        Text(f"{report.verdict}: {verdict} ({report.seconds:.0f} s)", style=style),
        Text(),
        Text(f"{shown(report.model)[1:-1]} at {report.url}, asked by {report.api}'s API"),
        f"{start}; {chunk}",
        Text(),
        table,
        *([Text(), *map(Text, notes)] if notes else []),
    )
