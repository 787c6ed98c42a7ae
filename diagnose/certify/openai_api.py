"""OpenAI's API: `/v1/completions` with log-probabilities, and what vLLM, SGLang and llama.cpp add to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diagnose.certify.api import (
    OTHERS,
    Answer,
    Http,
    Prompt,
    Refused,
    Server,
    ServerFailed,
    models,
    named,
    no_logprobs,
    number,
)

PATH = "/v1/completions"
_EXTRAS: tuple[dict[str, Any], ...] = ({"ignore_eos": True}, {"return_token_ids": True}, {"cache_salt": "1"})
"""Settings that are not OpenAI's own. Each is used where a server takes it."""


class OpenAI(Server):
    """A server with `/v1/completions`."""

    api = "OpenAI"

    def __init__(self, http: Http, model: str) -> None:
        super().__init__(http, model)
        self._extras: dict[str, Any] = {}

    @classmethod
    def found(cls, http: Http, model: str | None) -> OpenAI | None:
        """The server behind `http`, if it is one.

        Raises:
            UserError: it does not have the model, or has several and none was named.
        """
        listed = models(http)
        if listed is None:
            return None
        server = cls(http, named(model, [row["id"] for row in listed]))
        (row,) = (row for row in listed if row["id"] == server.model)
        context = row.get("max_model_len") or (row.get("meta") or {}).get("n_ctx")  # vLLM and SGLang, llama.cpp
        server.context = context if isinstance(context, int) else None
        server._look_at_settings()
        return server

    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        extras = self._extras | ({"cache_salt": salt} if "cache_salt" in self._extras else {})
        said = self._complete(prompts, max_tokens=tokens, temperature=temperature, **extras)
        cached = _cached(said)
        return [_answer(each, cached if len(prompts) == 1 else None) for each in said["choices"]]

    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        try:
            said = self._complete(prompts, max_tokens=1, temperature=0.0, echo=True)
        except Refused:
            return None
        answers = [_answer(each, None) for each in said["choices"]]
        if any(len(a.logprobs) != len(p) + 1 for a, p in zip(answers, prompts, strict=True)):
            return None  # it leaves `echo` aside
        return [
            Answer(a.tokens[-1:], a.logprobs[-1:], scored=a.logprobs[1 : len(p)])
            for a, p in zip(answers, prompts, strict=True)
        ]

    def _look_at_settings(self) -> None:
        """Find out what the server takes besides what is OpenAI's own."""
        self._complete(["1 + 1 ="], max_tokens=1, temperature=0.0)
        for extra in _EXTRAS:
            if self._takes(["1 + 1 ="], **extra):
                self._extras |= extra
        self.takes_ids = self._takes([[9, 10, 11]])
        self.lists = self._takes(["1 + 1 =", "2 + 2 ="])

    def _takes(self, prompts: Sequence[Prompt], **settings: Any) -> bool:
        try:
            self._complete(prompts, max_tokens=1, temperature=0.0, **settings)
        except (Refused, ServerFailed):
            return False
        return True

    def _complete(self, prompts: Sequence[Prompt], **settings: Any) -> dict[str, Any]:
        """An answer with as many choices as prompts, in their order."""
        prompt: Any = prompts[0] if len(prompts) == 1 else list(prompts)
        said = self.http.post(PATH, {"model": self.model, "prompt": prompt, "logprobs": OTHERS} | settings)
        choices = said.get("choices") if isinstance(said, dict) else None
        if not isinstance(choices, list) or len(choices) != len(prompts):
            raise ServerFailed(f"{PATH} answered another form than {len(prompts)} choices")
        return said | {"choices": sorted(choices, key=lambda choice: choice.get("index", 0))}


def _answer(choice: dict[str, Any], cached: int | None) -> Answer:
    said = choice.get("logprobs") or {}
    if "content" in said:  # llama.cpp says them as a chat does
        texts = [each.get("id", each["token"]) for each in said["content"] or ()]
        values = [each["logprob"] for each in said["content"] or ()]
        tops = [[other["logprob"] for other in each.get("top_logprobs") or ()] for each in said["content"] or ()]
    else:
        texts, values = said.get("tokens") or [], said.get("token_logprobs") or []
        tops = [list((top or {}).values()) for top in said.get("top_logprobs") or ()]
    if not values:
        raise no_logprobs(
            f"answers of {PATH} without log-probabilities", "Ask a server that gives them for `logprobs`."
        )
    ids = choice.get("token_ids")
    return Answer(
        tokens=tuple(texts if ids is None or len(ids) != len(values) else ids),
        logprobs=tuple(number(value) for value in values),
        others=tuple(tuple(sorted(map(number, top), reverse=True)) for top in tops),
        cached=cached,
    )


def _cached(said: dict[str, Any]) -> int | None:
    """Tokens of the prompt that came from a cache, where the server says so."""
    details = (said.get("usage") or {}).get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(count := details.get("cached_tokens"), int):
        return count
    return None
