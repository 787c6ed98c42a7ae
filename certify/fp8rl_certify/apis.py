"""The two APIs of servers: SGLang's `/generate` with token ids, and OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from fp8rl_certify.api import OTHERS, Answer, Prompt, Server, fitting, models, named, no_logprobs
from fp8rl_certify.http import Count, Http, Logprob, Name, Refused, Said, Scored, ServerFailed, TokenId

GENERATE = "/generate"


class _ModelInfo(Said):
    model_path: Name
    served_model_name: Name | None = None


class _ServerInfo(Said):
    chunked_prefill_size: int | None = None


class _Reason(Said):
    type: str = ""
    message: str = "no reason given"


class _MetaInfo(Said):
    finish_reason: _Reason | None = None
    output_token_logprobs: list[Scored] | None = None
    output_top_logprobs: list[list[Scored] | None] | None = None
    input_token_logprobs: list[Scored] | None = None
    cached_tokens: Count | None = None


class _Generated(Said):
    meta_info: _MetaInfo


_MODEL_INFO, _SERVER_INFO = TypeAdapter(_ModelInfo), TypeAdapter(_ServerInfo)
_GENERATED = TypeAdapter(list[_Generated])


class SGLang(Server):
    """A server with `/generate`."""

    api = "SGLang"

    @classmethod
    def found(cls, http: Http, model: str | None) -> SGLang | None:
        """Return the server behind `http`, or None if it does not have this API.

        Raises:
            UserError: the server has another model.
        """
        try:
            said = http.get("/model_info", _MODEL_INFO)
        except (Refused, ServerFailed):
            return None
        server = cls(http, named(model, [said.served_model_name or said.model_path]))
        server.context = next((row.context for row in models(http) or ()), None)
        try:
            chunk = http.get("/server_info", _SERVER_INFO).chunked_prefill_size
        except (Refused, ServerFailed):  # closed in an engine of ours: it would show a key
            return server
        server.chunk = chunk if chunk is not None and 0 < chunk < 1 << 20 else None
        return server

    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        said = self._generate(prompts, sampling, salt, top_logprobs_num=OTHERS)
        return [fitting(_sglang_answer(each), tokens, GENERATE) for each in said]

    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        answers = [_sglang_answer(each) for each in self._generate(prompts, sampling, salt, logprob_start_len=0)]
        whole = all(len(a.scored or ()) == len(p) - 1 for a, p in zip(answers, prompts, strict=True))
        return answers if whole else None

    def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], salt: str, **more: Any
    ) -> list[_Generated]:
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {key: list(prompts), "sampling_params": sampling, "return_logprob": True, "extra_key": salt, **more}
        answers = self.http.post(GENERATE, body, _GENERATED)
        if len(answers) != len(prompts):
            raise ServerFailed(f"{GENERATE} answered {len(answers)} times to {len(prompts)} prompts")
        return answers


def _sglang_answer(found: _Generated) -> Answer:
    meta = found.meta_info
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise ServerFailed(f"{GENERATE} gave up: {meta.finish_reason.message[:200]!r}")
    if meta.output_token_logprobs is None:
        raise no_logprobs(f"answers of {GENERATE} without output_token_logprobs", "Start it with log-probabilities.")
    return Answer(
        tokens=tuple(token for _, token in meta.output_token_logprobs),
        logprobs=tuple(logprob for logprob, _ in meta.output_token_logprobs),
        others=tuple(tuple(logprob for logprob, _ in top or ()) for top in meta.output_top_logprobs or ()),
        cached=meta.cached_tokens,
        scored=tuple(logprob for logprob, _ in meta.input_token_logprobs[1:]) if meta.input_token_logprobs else None,
    )


# OpenAI's API: `/v1/completions` with log-probabilities, and what vLLM, SGLang and llama.cpp add to it.

COMPLETIONS = "/v1/completions"
_EXTRAS: tuple[dict[str, Any], ...] = ({"ignore_eos": True}, {"return_token_ids": True}, {"cache_salt": "1"})
"""Settings beyond OpenAI's API. Each is used if the server accepts it."""


class _Other(Said):
    logprob: Logprob


class _Token(_Other):
    """A token in the form of llama.cpp, which is OpenAI's form for chats."""

    token: str = ""
    id: TokenId | None = None
    top_logprobs: list[_Other] | None = None


class _Logprobs(Said):
    """Log-probabilities in OpenAI's form or in llama.cpp's."""

    tokens: list[str] | None = None
    token_logprobs: list[Logprob] | None = None
    top_logprobs: list[dict[str, Logprob] | None] | None = None
    content: list[_Token] | None = None


class _Choice(Said):
    index: Count = 0
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None


class _Details(Said):
    cached_tokens: Count | None = None


class _Usage(Said):
    prompt_tokens_details: _Details | None = None


class _Completion(Said):
    choices: list[_Choice]
    usage: _Usage | None = None

    @property
    def cached(self) -> int | None:
        """Number of the prompt's tokens that came from the cache; None if the server does not say."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


_COMPLETION = TypeAdapter(_Completion)


class OpenAI(Server):
    """A server with `/v1/completions`."""

    api = "OpenAI"

    def __init__(self, http: Http, model: str) -> None:
        super().__init__(http, model)
        self._extras: dict[str, Any] = {}

    @classmethod
    def found(cls, http: Http, model: str | None) -> OpenAI | None:
        """Return the server behind `http`, or None if it does not have this API.

        Raises:
            UserError: the server does not have the model, or it has several models and none was named.
        """
        listed = models(http)
        if listed is None:
            return None
        server = cls(http, named(model, [row.id for row in listed]))
        server.context = next(row.context for row in listed if row.id == server.model)
        server._look_at_settings()
        return server

    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        extras = self._extras | ({"cache_salt": salt} if "cache_salt" in self._extras else {})
        said = self._complete(prompts, max_tokens=tokens, temperature=temperature, **extras)
        cached = said.cached if len(prompts) == 1 else None
        return [fitting(_openai_answer(each, cached), tokens, COMPLETIONS) for each in said.choices]

    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        try:
            said = self._complete(prompts, max_tokens=1, temperature=0.0, echo=True)
        except Refused:
            return None
        answers = [_openai_answer(each, None) for each in said.choices]
        if any(len(a.logprobs) != len(p) + 1 for a, p in zip(answers, prompts, strict=True)):
            return None  # it leaves `echo` aside
        return [
            Answer(a.tokens[-1:], a.logprobs[-1:], scored=a.logprobs[1 : len(p)])
            for a, p in zip(answers, prompts, strict=True)
        ]

    def _look_at_settings(self) -> None:
        """Find out which settings beyond OpenAI's API the server accepts, and which forms of prompts."""
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

    def _complete(self, prompts: Sequence[Prompt], **settings: Any) -> _Completion:
        """Return the server's answer, with one choice for each prompt, in the order of the prompts."""
        prompt: Any = prompts[0] if len(prompts) == 1 else list(prompts)
        body = {"model": self.model, "prompt": prompt, "logprobs": OTHERS} | settings
        said = self.http.post(COMPLETIONS, body, _COMPLETION)
        if len(said.choices) != len(prompts):
            raise ServerFailed(f"{COMPLETIONS} answered {len(said.choices)} choices to {len(prompts)} prompts")
        return said.model_copy(update={"choices": sorted(said.choices, key=lambda choice: choice.index)})


def _openai_answer(choice: _Choice, cached: int | None) -> Answer:
    said = choice.logprobs or _Logprobs()
    names: list[int] | list[str] | list[int | str]
    if said.content is not None:
        names = [token.token if token.id is None else token.id for token in said.content]
        values = [token.logprob for token in said.content]
        tops = [[other.logprob for other in token.top_logprobs or ()] for token in said.content]
    else:
        names, values = said.tokens or [], said.token_logprobs or []
        tops = [list((top or {}).values()) for top in said.top_logprobs or ()]
    if not values:
        raise no_logprobs(
            f"answers of {COMPLETIONS} without log-probabilities", "Ask a server that gives them for `logprobs`."
        )
    if choice.token_ids is not None and len(choice.token_ids) == len(values):
        names = choice.token_ids
    return Answer(
        tokens=tuple(names),
        logprobs=tuple(values),
        others=tuple(tuple(sorted(top, reverse=True)) for top in tops),
        cached=cached,
    )
