"""SGLang's own API: `/generate` with token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from fp8rl.diagnose.certify.api import OTHERS, Answer, Prompt, Server, fitting, models, named, no_logprobs
from fp8rl.diagnose.certify.http import Http, Refused, ServerFailed
from fp8rl.diagnose.certify.said import Count, Name, Said, Scored

PATH = "/generate"


class _ModelInfo(Said):
    model_path: Name
    served_model_name: Name | None = None


class _ServerInfo(Said):
    chunked_prefill_size: int | None = None


class _Reason(Said):
    type: str = ""
    message: str = "no reason given"


class _Meta(Said):
    finish_reason: _Reason | None = None
    output_token_logprobs: list[Scored] | None = None
    output_top_logprobs: list[list[Scored] | None] | None = None
    input_token_logprobs: list[Scored] | None = None
    cached_tokens: Count | None = None


class _Generated(Said):
    meta_info: _Meta


_MODEL_INFO, _SERVER_INFO = TypeAdapter(_ModelInfo), TypeAdapter(_ServerInfo)
_GENERATED = TypeAdapter(list[_Generated])


class SGLang(Server):
    """A server with `/generate`."""

    api = "SGLang"

    @classmethod
    def found(cls, http: Http, model: str | None) -> SGLang | None:
        """The server behind `http`, if it is one.

        Raises:
            UserError: it has another model.
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
        return [fitting(_answer(each), tokens, PATH) for each in said]

    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer] | None:
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        answers = [_answer(each) for each in self._generate(prompts, sampling, salt, logprob_start_len=0)]
        whole = all(len(a.scored or ()) == len(p) - 1 for a, p in zip(answers, prompts, strict=True))
        return answers if whole else None

    def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any], salt: str, **more: Any
    ) -> list[_Generated]:
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {key: list(prompts), "sampling_params": sampling, "return_logprob": True, "extra_key": salt, **more}
        answers = self.http.post(PATH, body, _GENERATED)
        if len(answers) != len(prompts):
            raise ServerFailed(f"{PATH} answered {len(answers)} times to {len(prompts)} prompts")
        return answers


def _answer(found: _Generated) -> Answer:
    meta = found.meta_info
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise ServerFailed(f"{PATH} gave up: {meta.finish_reason.message[:200]!r}")
    if meta.output_token_logprobs is None:
        raise no_logprobs(f"answers of {PATH} without output_token_logprobs", "Start it with log-probabilities.")
    return Answer(
        tokens=tuple(token for _, token in meta.output_token_logprobs),
        logprobs=tuple(logprob for logprob, _ in meta.output_token_logprobs),
        others=tuple(tuple(logprob for logprob, _ in top or ()) for top in meta.output_top_logprobs or ()),
        cached=meta.cached_tokens,
        scored=tuple(logprob for logprob, _ in meta.input_token_logprobs[1:]) if meta.input_token_logprobs else None,
    )
