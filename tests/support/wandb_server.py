"""A wandb server of ours on a real socket: it takes runs, and may stall."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Handler, http_server, url_of

ACCOUNT = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
PROJECT = {"id": "p", "name": "test", "entity": {"id": "e", "name": "me"}}


@dataclass
class WandbServer:
    """Answers what wandb 0.31 asks when it uploads a run.

    history: by run id, the rows that have come, where the upload says that they belong. stalls: once set, whoever asks
    waits until `go_on` is. refuses: once set, nobody is let in.
    """

    url: str
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stalls: threading.Event = field(default_factory=threading.Event)
    refuses: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: bytes) -> Any:
        if path.endswith("/graphql"):
            asked = json.loads(body)
            (name,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", asked["query"])
            return {"data": self._data(name, asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            if (part := files.get("wandb-history.jsonl")) is not None:
                self.history.setdefault(path.split("/")[-2], [])[part["offset"] :] = map(json.loads, part["content"])
        return {}

    def _data(self, name: str, variables: dict[str, Any]) -> Any:
        match name:
            case "Viewer":
                return {"viewer": ACCOUNT}
            case "UpsertBucket":
                run = {"id": variables["name"], "name": variables["name"], "displayName": "demo", "project": PROJECT}
                return {"upsertBucket": {"bucket": {**run, "config": "{}", "historyLineCount": 0}, "inserted": True}}
            case "RunResumeStatus":
                return {"model": {"bucket": self._known(variables["name"])}}
            case "ArtifactType":
                return {"project": None}
            case "CreateRunFiles":
                files = [{"name": each, "uploadUrl": f"{self.url}/storage/{each}"} for each in variables["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            case "CreateArtifact":
                sequence = {"id": "s", "latestArtifact": None}
                return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
        return {}

    def _known(self, run: str) -> dict[str, Any] | None:
        """What a resumed upload must know of the rows before it."""
        if run not in self.history:
            return None
        rows = self.history[run]
        counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(rows[-1])]), "eventsTail": "[]", "summaryMetrics": "{}"}
        return {"id": run, "name": run, **counts, **tails, "config": "{}", "wandbConfig": '{"t": 1}'}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    class Answering(Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if server.stalls.is_set():
                server.go_on.wait()
            refused = server.refuses.is_set()
            answer = json.dumps({"errors": []} if refused else server.answer(self.path, body)).encode()
            self.send(answer, 401 if refused else 200, {"content-type": "application/json"})

        do_PUT = do_GET = do_POST

    with http_server(Answering) as http:
        server = WandbServer(url_of(http))
        try:
            yield server
        finally:
            server.go_on.set()
