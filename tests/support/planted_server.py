"""A small HTTP server of both APIs whose answers are a function of the prompt, but for a fault that is planted."""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fp8rl_certify import api, probe
from tests.support.http_server import Handler, http_server, url_of

CHUNK = 128
NAME = "planted"


@dataclass
class Planted:
    """How the server behaves.

    fault: what answers depend on besides their prompt: batch, cache, prefill, chunk, repetition, or nothing.
    key: it demands. logprobs: it gives. ids: it says token ids. caches: it reuses prefixes. salts: it keeps those of
    one salt apart. lists: it takes several prompts in a request. stall_after: of so many requests, none is answered.
    status: of every answer, if not 200.
    """

    fault: str = ""
    key: str | None = None
    native: bool = True
    logprobs: bool = True
    ids: bool = True
    caches: bool = True
    salts: bool = True
    lists: bool = True
    context: int = 2048
    stall_after: int | None = None
    status: int = 200
    requests: int = 0
    seen: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, prompt: Sequence[int], tokens: int, salt: str, beside: int) -> dict[str, Any]:
        """What is generated behind a prompt while `beside` others are in the batch."""
        cached = self._cached(prompt, salt)
        moved = {
            "batch": beside >= 7,
            "cache": cached > 0,
            "chunk": len(prompt) - cached > CHUNK and cached % CHUNK != 0,
            "repetition": True,
        }.get(self.fault, False)
        shift = self.requests if self.fault == "repetition" else 1
        row, said = list(prompt), []
        for _ in range(tokens):
            token = 8 + _hash(row) % 56
            said.append((token, _logprob(row, token) - (2.0**-20 * shift if moved else 0.0)))
            row.append(token)
        with self.lock:
            self.seen.setdefault(salt, set()).update({tuple(prompt), tuple(row)})
        return {"said": said, "cached": cached}

    def respond(self, path: str, body: dict[str, Any] | None, authorization: str | None = None) -> tuple[int, Any]:
        """Status and JSON of the answer to a request, which has a body if it is a POST."""
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "no"}
        if self.status != 200:
            return self.status, {"error": "planted"}
        paths: dict[str, Any] = {
            "/v1/models": {"data": [{"id": NAME, "max_model_len": self.context}]},
            "/model_info": {"model_path": NAME}, "/server_info": {"chunked_prefill_size": CHUNK},
        }  # fmt: skip
        if not self.native and path != "/v1/models" and path != "/v1/completions":
            return 404, {}
        if body is None:
            return (200, paths[path]) if path in paths else (404, {})
        return {"/generate": self._generate, "/v1/completions": self._complete}[path](body)

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        rows, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if any(len(row) + tokens > self.context for row in rows):
            return 400, {"error": "too long"}
        found = []
        for row in rows:
            scored = self.scored(row) if body.get("logprob_start_len") == 0 else []
            answer = self.answer(row, tokens, body["extra_key"], len(rows) - 1)
            meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "cached_tokens": answer["cached"]}
            if self.logprobs:
                meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in answer["said"]]
                meta["input_token_logprobs"] = [[value, 0, None] for value in [None, *scored]] if scored else []
            found.append({"meta_info": meta})
        return 200, found

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if several and len(prompt) > 1 and not self.lists:
            return 400, {"error": "one prompt"}
        texts = prompt if several else [prompt]
        rows = [[ord(letter) % 256 for letter in each] if isinstance(each, str) else list(each) for each in texts]
        if not self.ids and not isinstance(prompt, str) and not (several and isinstance(prompt[0], str)):
            return 400, {"error": "text only"}
        if any(len(row) + body["max_tokens"] > self.context for row in rows):
            return 400, {"error": "too long"}
        salt = body.get("cache_salt", "") if self.salts else ""
        found = [self.answer(row, body["max_tokens"], salt, len(rows) - 1) for row in rows]
        choices = []
        for index, (row, answer) in enumerate(zip(rows, found, strict=True)):
            echoed = [(token, value) for token, value in zip(row, [None, *self.scored(row)], strict=True)]
            said = (echoed if body.get("echo") else []) + answer["said"]
            logprobs = {"tokens": [f"<{token}>" for token, _ in said], "token_logprobs": [value for _, value in said]}
            choice = {"index": index, "logprobs": logprobs if self.logprobs else None}
            if body.get("return_token_ids") and self.ids:
                choice["token_ids"] = [token for token, _ in answer["said"]]
            choices.append(choice)
        details = {"cached_tokens": cached} if (cached := sum(answer["cached"] for answer in found)) else None
        return 200, {"choices": choices[::-1], "usage": {"prompt_tokens_details": details}}

    def scored(self, prompt: Sequence[int]) -> list[float]:
        """Log-probabilities of a prompt's tokens but the first."""
        shift = 2.0**-20 if self.fault == "prefill" else 0.0
        return [_logprob(prompt[:place], prompt[place]) - shift for place in range(1, len(prompt))]

    def _cached(self, prompt: Sequence[int], salt: str) -> int:
        if not self.caches:
            return 0
        with self.lock:
            return max((_common(prompt, each) for each in self.seen.get(salt, ())), default=0)


def ask_little(patch: pytest.MonkeyPatch) -> None:
    """Have a server be asked for fewer and shorter answers than a user asks for, without a key."""
    for name, value in (("TOKENS", 8), ("BATCHES", (8,)), ("LOAD", 4), ("LOAD_TOKENS", 8)):
        patch.setattr(probe, name, value)
    patch.setattr(api, "SHORT", (5, 40, 200))
    patch.setattr(api, "LONGEST", 400)
    patch.delenv("FP8RL_API_KEY", raising=False)


@contextmanager
def serve(planted: Planted) -> Iterator[str]:
    """Its address, for as long as the block lasts."""
    with http_server(type("Handler", (_Handler,), {"planted": planted})) as server:
        try:
            yield url_of(server)
        finally:
            planted.over.set()


class _Handler(Handler):
    planted: Planted

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.body()))

    def _answer(self, body: dict[str, Any] | None) -> None:
        planted = self.planted
        with planted.lock:
            planted.requests += 1
        if planted.stall_after is not None and planted.requests > planted.stall_after:
            planted.over.wait()
            self.close_connection = True
            return
        status, value = planted.respond(self.path, body, self.headers.get("Authorization"))
        self.send(json.dumps(value).encode(), status)


def _logprob(row: Sequence[int], token: int) -> float:
    return -(1 + _hash([*row, token]) % 5000) / 1024


def _hash(row: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(bytes(row[-8:]), digest_size=4).digest(), "big")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with; of a prompt, the last is computed always."""
    length = min(len(one) - 1, len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)
