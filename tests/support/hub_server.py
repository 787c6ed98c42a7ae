"""A server on this machine that speaks the hub's protocol, as far as its clients use it to fetch a repository."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.http_server import Handler, http_server, url_of

TOKEN = "hf_ofatest"


@dataclass
class Repository:
    """revisions: the files of each commit, by name. branches: the commit that each is at. gated: without a token."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Put a branch at a commit with these files; return its 40 digits."""
        text = repr(sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items()))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.revisions[sha] = files
        self.branches[branch] = sha
        return sha


@dataclass
class Hub:
    """What the server has, by `models/owner/name` or `datasets/owner/name`, and the paths that it was asked for."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    odd: Callable[[Any, str], bool] = lambda handler, path: False
    """Answers a request in place of the hub, by the handler and the path; False: it does not."""


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()

    class Answering(Handler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append(f"{self.command} {path}")
            if hub.odd(self, path):
                return None
            api = path.startswith("api/")
            parts = path.removeprefix("api/").split("/")
            kind = parts.pop(0) if api or parts[0] == "datasets" else "models"
            repository = hub.repositories.get("/".join([kind, *parts[:2]]))
            if repository is None:
                return self._fail(404, "RepoNotFound")
            if repository.gated and not api and self.headers.get("authorization") != f"Bearer {TOKEN}":
                return self._fail(401, "GatedRepo")
            what, revision, *rest = [*parts[2:], "revision", "main"][: max(2, len(parts) - 2)]
            sha = repository.branches.get(revision, revision)
            if sha not in repository.revisions:
                return self._fail(404, "RevisionNotFound")
            files = repository.revisions[sha]
            if what == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self.send(json.dumps({"id": "/".join(parts[:2]), "sha": sha, "siblings": siblings}).encode())
            if what == "tree":
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in files.items()
                ]
                return self.send(json.dumps(tree).encode())
            if (data := files.get("/".join(rest))) is None:
                return self._fail(404, "EntryNotFound")
            return self.send(data, 200, {"x-repo-commit": sha, "etag": f'"{_etag(data)}"'})

        do_HEAD = do_GET

        def _fail(self, status: int, code: str) -> None:
            self.send(b"{}", status, {"x-error-code": code})

    with http_server(Answering) as server:
        hub.url = url_of(server)
        yield hub


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
