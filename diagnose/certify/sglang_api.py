"""SGLang's own API: `/generate` with token ids."""

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
            said = http.get("/model_info")
        except (Refused, ServerFailed):
            return None
        if not isinstance(said, dict) or "model_path" not in said:
            return None
        served = str(said.get("served_model_name") or said["model_path"])
        server = cls(http, named(model, [served]))
        for row in models(http) or ():
            server.context = row.get("max_model_len")
        try:
            chunk = http.get("/server_info").get("chunked_prefill_size")
        except (Refused, ServerFailed):  # closed in an engine of ours: it would show a key
            return server
        server.chunk = chunk if isinstance(chunk, int) and chunk > 0 else None
        return server

    def ask(self, prompts: Sequence[Prompt], tokens: int, salt: str, *, temperature: float = 0.0) -> list[Answer]:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return [_answer(each) for each in self._generate(prompts, sampling, salt, top_logprobs_num=OTHERS)]

    def score(self, prompts: Sequence[list[int]], salt: str) -> list[Answer]:
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        return [_answer(each) for each in self._generate(prompts, sampling, salt, logprob_start_len=0)]

    def _generate(self, prompts: Sequence[Prompt], sampling: dict[str, Any], salt: str, **more: Any) -> list[Any]:
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {key: list(prompts), "sampling_params": sampling, "return_logprob": True, "extra_key": salt, **more}
        answers = self.http.post("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise ServerFailed(f"/generate answered another form than a list of {len(prompts)}")
        return answers


def _answer(found: dict[str, Any]) -> Answer:
    meta = found["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ServerFailed(f"/generate gave up: {reason.get('message', 'no reason given')}")
    if "output_token_logprobs" not in meta:
        raise no_logprobs("answers of /generate without output_token_logprobs", "Start it with log-probabilities.")
    said = meta["output_token_logprobs"]
    scored = meta.get("input_token_logprobs") or None
    return Answer(
        tokens=tuple(token for _, token, *_ in said),
        logprobs=tuple(number(logprob) for logprob, *_ in said),
        others=tuple(
            tuple(number(logprob) for logprob, *_ in top or ()) for top in meta.get("output_top_logprobs") or ()
        ),
        cached=meta.get("cached_tokens"),
        scored=None if scored is None else tuple(number(logprob) for logprob, *_ in scored[1:]),
    )
