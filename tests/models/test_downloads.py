"""A hub that lies, drips or never ends: one sentence, soon, and nothing is written outside the cache."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fp8rl.models import downloads
from fp8rl.models.hub import model_directory
from fp8rl.numerics.core.errors import UserError
from tests.support.hub_server import Hub, Repository, hub_server

pytestmark = pytest.mark.slow
INFO = "info"
NAME, SHA = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"
Odd = Callable[[Any, str], bool]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        where = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": url, "HF_HUB_CACHE": f"{tmp_path}/in/cache"}
        limits = {"HF_HUB_OFFLINE": False, "HF_HUB_ETAG_TIMEOUT": 0.5, "HF_HUB_DOWNLOAD_TIMEOUT": 0.5}
        for name, value in (where | limits).items():
            monkeypatch.setattr(constants, name, value)
        for name, value in (("PATIENCE_S", 0.5), ("SILENCE_S", 0.3), ("MOST_SILENCES", 1), ("MOST_TRIES", 3)):
            monkeypatch.setattr(downloads, name, value)
        monkeypatch.setattr(downloads.Limits, "__init__", _small(downloads.Limits.__init__))
        hub.repositories[f"models/{NAME}"] = Repository()
        hub.repositories[f"models/{NAME}"].commit({"config.json": b"{}", "model.safetensors": b"x" * 1000})
        yield hub


def _small(original: Any) -> Any:
    return lambda self: original(self, size=1 << 20, requests=20)


def about(what: str, path: str) -> bool:
    return path.startswith("api/") and "/tree/" not in path if what == INFO else what in path


def said(what: str, body: Any, headers: dict[str, str] | None = None, status: int = 200) -> Odd:
    """Answer requests for such paths so."""

    def odd(handler: Any, path: str) -> bool:
        if found := about(what, path):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            handler.send(data, status, headers)
        return found

    return odd


def sent(what: str, pieces: Callable[[], Iterator[bytes]], pause: float = 0.0) -> Odd:
    """Answer requests for such paths with pieces of what goes over the wire."""

    def odd(handler: Any, path: str) -> bool:
        if not about(what, path):
            return False
        handler.close_connection = True
        try:
            for piece in pieces():
                handler.wfile.write(piece)
                time.sleep(pause)
        except OSError:
            pass
        return True

    return odd


def endless(head: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield head
        yield from (piece for _ in count())

    return pieces


def file(**headers: str) -> dict[str, str]:
    return {"x-repo-commit": SHA, "etag": f'"{SHA}"'} | {name.replace("_", "-"): text for name, text in headers.items()}


def info(**changes: Any) -> dict[str, Any]:
    return {"id": NAME, "sha": SHA, "siblings": []} | changes


def entry(**changes: Any) -> list[dict[str, Any]]:
    return [{"type": "file", "path": "config.json", "size": 2, "oid": SHA} | changes]


OUT, DEEP = "../../../../out", b"[" * 9999
HEAD = b"HTTP/1.1 200 OK\r\na: "
META = f'HTTP/1.1 200 OK\r\nx-repo-commit: {SHA}\r\netag: "{SHA}"\r\n'.encode()
LONG, CHUNKED = b"content-length: 1000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"
CASES: dict[str, Odd] = {
    **{f"sha {sha!r}": said(INFO, info(sha=sha)) for sha in (OUT, "", None, "A" * 40)},
    **{f"etag {tag!r}": said("resolve", b"{}", file(etag=tag)) for tag in (OUT, '"a/../b"', "..")},
    "linked etag": said("resolve", b"{}", file(x_linked_etag=OUT)),
    "commit of a file": said("resolve", b"{}", file(x_repo_commit=OUT)),
    **{f"path {path!r}": said("tree", entry(path=path)) for path in (OUT, "/out.json", "a/../../out.json", 7)},
    "digest of the listing": said("tree", entry(oid=OUT)),
    "no digest of xet": said("tree", entry(xetHash="../x")),
    "digest of a large file": said("tree", entry(lfs={"oid": OUT, "size": 2, "pointerSize": 2}, xetHash="0" * 64)),
    **{f"size {size!r}": said("tree", entry(size=size)) for size in ("x", None)},
    **{f"info {body!r:.20}": said(INFO, body) for body in (None, [], {}, b"{", b"\xff", DEEP)},
    **{f"siblings {some!r}": said(INFO, info(siblings=some)) for some in (7, [{}])},
    **{f"tree {body!r:.20}": said("tree", body) for body in ({}, [7], [{}], b"<html>", b"", DEEP)},
    "packed": said("tree", gzip.compress(b"[" + b" " * 10**7 + b"]"), {"content-encoding": "gzip"}),
    "packed file": said("resolve", gzip.compress(b"{}"), file(content_encoding="gzip")),
    "goes round": lambda handler, path: said("", b"", {"location": "/" + path}, 302)(handler, path),
    "next page for ever": lambda handler, path: said(
        "tree", entry(), {"link": f'<http://{handler.headers["host"]}/{path}?cursor={time.monotonic()}>; rel="next"'}
    )(handler, path),
    "wait": said("", b"{}", {"retry-after": "99999999"}, 429),
    "wait for the listing": said("tree", b"{}", {"retry-after": "99999999"}, 429),
    "rate": said("tree", b"{}", {"ratelimit": '"api";r=0;t=99999999'}, 429),
    **{f"silent {what}": sent(what, lambda: iter([b""]), 60.0) for what in (INFO, "tree", "resolve")},
    **{f"closed {what}": sent(what, lambda: iter([])) for what in (INFO, "tree")},
    **{f"head drips {what}": sent(what, endless(HEAD, b"x"), 0.1) for what in (INFO, "tree", "resolve")},
    **{f"body drips {what}": sent(what, endless(HEAD[:-3] + LONG, b"["), 0.1) for what in (INFO, "tree")},
    "file drips": sent("resolve", endless(META + LONG, b"x"), 0.1),
    **{f"endless {what}": sent(what, endless(HEAD[:-3] + CHUNKED, CHUNK)) for what in (INFO, "tree")},
    "endless file": sent("resolve", endless(META + CHUNKED, CHUNK)),
    "continues for ever": sent("tree", endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)),
    "cut for ever": sent("resolve", lambda: iter([META + LONG, b"x"])),
    "no http": sent("", lambda: iter([b"SSH-2.0-x\r\n"])),
    "header of a megabyte": sent("tree", endless(HEAD, b"x" * 65536)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_no_hub_does_is_one_sentence_and_writes_nothing_outside_the_cache(
    name: str, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.odd = CASES[name]
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        model_directory(NAME, None, "model.path")
    assert time.monotonic() - began < 75
    text = str(refused.value)
    assert text.startswith("model.path: found owner/tiny") and "\n" not in text and len(text) < 1000
    cache = tmp_path / "in/cache"
    assert not {path for path in tmp_path.rglob("*") if cache not in (path, *path.parents)} - {cache.parent}
    assert not any("out" in path.name for path in cache.rglob("*"))
