"""Mistakes of engines, planted in dumps of a model that is sure of most tokens: each is seen, and no wrong
cause is named. Honest engines are within the floor."""

import copy
import functools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import sample_problem
from fp8rl_certify import dump as certifying
from fp8rl_certify.dump import certify_dump, reference
from fp8rl_certify.dump.dump_report import DumpReport, sentence
from fp8rl_certify.dump.reference import Reference
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.slow

BOS, EOS, ROWS, ANSWER = 1, 2, 48, 18
UNKNOWN = "the engine: off, cause unknown: mean |d| "
Change = Callable[[Any], None]


class Engine:
    """The example of arithmetic, a MoE whose eager attention is several times as far from FP32 as its fused one, and
    answers that it has sampled at temperature 1, four to a prompt."""

    def __init__(self, path: Path) -> None:
        self.path, drawn, problems = path, torch.Generator().manual_seed(0), random.Random(0)
        example = EXAMPLES / "models/tiny_qwen3_moe"
        self.model = AutoModelForCausalLM.from_pretrained(example, dtype=torch.bfloat16).eval()
        self.model.config.bos_token_id = BOS
        self.model.save_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(example)
        turns = [[{"role": "user", "content": sample_problem(problems, False).question}] for _ in range(ROWS // 4)]
        prompts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        self.prompt, ids = len(prompts[0]), torch.tensor(prompts).repeat_interleave(4, 0)
        with torch.no_grad():
            for _ in range(ANSWER):
                p = self.model(ids).logits[:, -1].float().softmax(-1)
                ids = torch.cat([ids, torch.multinomial(p, 1, generator=drawn)], 1)
        self.tokens = ids
        self.logits = self.asked()

    @torch.no_grad()
    def asked(self, change: Change | None = None, config: Change | None = None, front: int = 0, **how: Any) -> Tensor:
        """float64 [B, T, V], the logits of the answers, by weights and a config that may be changed."""
        model = copy.deepcopy(self.model).to(how.pop("dtype", torch.bfloat16))
        if config is not None:
            config(model.config)
            state, model = model.state_dict(), type(model)(model.config).to(model.dtype).eval()
            model.load_state_dict(state)
        if change is not None:
            change(model)
        if how.pop("eager", False):
            model.set_attn_implementation("eager")
        ids = torch.cat([torch.full((ROWS, front), BOS), self.tokens], 1)
        logits: Tensor = model(ids, use_cache=False, **how).logits
        return logits[:, front + self.prompt - 1 : -1].double()

    def said(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """float64 [B, T], log-probabilities of the answers."""
        return (logits / temperature).log_softmax(-1).gather(-1, self.tokens[:, self.prompt :, None]).squeeze(-1)

    def certified(self, name: str, said: Tensor, folder: Path) -> DumpReport:
        """Certify answers up to their end, with what is DECLARED beside them."""
        found, more = [], DECLARED[name](self) if name in DECLARED else {}
        for number, (tokens, values) in enumerate(zip(self.tokens.tolist(), said.clamp(max=0.0).tolist(), strict=True)):
            rest = {key: value[number] if isinstance(value, list) else value for key, value in more.items()}
            length = ([*tokens[self.prompt :], EOS].index(EOS) + 1) if EOS in tokens[self.prompt :] else ANSWER
            rest = {key: value[:length] if isinstance(value, list) else value for key, value in rest.items()}
            row = {"tokens": tokens[: self.prompt + length], "prompt_length": self.prompt, "logprobs": values[:length]}
            found.append(json.dumps(row | rest))
        (folder / "dump.jsonl").write_text("\n".join(found))
        return certify_dump(folder / "dump.jsonl", self.path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("model"))


_model = functools.cache(Reference)


@functools.cache
def _logits(tokens: tuple[int, ...], *model: Any) -> Tensor:
    return _model(*model).logits(tokens)


class Once:
    """A `Reference` whose passes are computed once: all dumps are of one model, and nearly of the same tokens."""

    def __init__(self, *model: Any) -> None:
        self._given = model

    def logits(self, tokens: list[int]) -> Tensor:
        return _logits(tuple(tokens), *self._given)


@pytest.fixture(autouse=True)
def without_our_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the floor, and take longer than all else."""
    monkeypatch.setattr(certifying, "_by_our_ops", lambda *given: ({}, ""))
    monkeypatch.setattr(reference, "Reference", Once)


@torch.no_grad()
def _cached(engine: Engine) -> Tensor:
    found = engine.model(engine.tokens[:, : engine.prompt], use_cache=True)
    logits = [found.logits[:, -1]]
    for token in engine.tokens[:, engine.prompt : -1].unbind(1):
        found = engine.model(token[:, None], past_key_values=found.past_key_values, use_cache=True)
        logits.append(found.logits[:, -1])
    return torch.stack(logits, 1).double()


def _padded(engine: Engine) -> Tensor:
    mask = torch.ones(ROWS, 3 + engine.tokens.shape[1], dtype=torch.int64)
    mask[:, :3] = 0
    return engine.asked(front=3, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


HONEST: dict[str, Callable[[Engine], Tensor]] = {
    "fused attention": lambda e: e.said(e.logits), "eager attention": lambda e: e.said(e.asked(eager=True)),
    "a batch with padding": lambda e: e.said(_padded(e)), "a KV cache": lambda e: e.said(_cached(e)),
    "FP32": lambda e: e.said(e.asked(dtype=torch.float32)), "FP16": lambda e: e.said(e.asked(dtype=torch.float16)),
    "log-probabilities in BF16": lambda e: e.said(e.logits).bfloat16().double(),
    "log-probabilities with three digits": lambda e: e.said(e.logits).round(decimals=3),
    "top-p 0.9, declared": lambda e: _of_top_p(e).clamp(min=-50.0),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_engine_is_within_the_floor(engine: Engine, tmp_path: Path, name: str) -> None:
    report = engine.certified(name, HONEST[name](engine), tmp_path)
    assert (report.verdict, report.sides[0].explanations) == ("within the floor", [])


def _noise(size: float) -> Change:
    def change(model: Any) -> None:
        drawn = torch.Generator().manual_seed(3)
        for weight in model.parameters():
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=drawn).to(weight.dtype))

    return change


def _capped(engine: Engine, part: float) -> Tensor:
    cap = part * engine.logits.abs().max()
    return engine.said(cap * (engine.logits / cap).tanh())


def _of_top_p(engine: Engine, p: float = 0.9) -> Tensor:
    """Renormalised over the tokens of top-p; -inf outside."""
    probabilities, ids = engine.logits.softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= p
    outside = outside.scatter(-1, ids, outside)
    return engine.said(engine.logits.masked_fill(outside, -math.inf))


def _sampled(engine: Engine) -> dict[str, Any]:
    return {"mask": _of_top_p(engine).isfinite().int().tolist()}


def _of_one_prompt_swapped(engine: Engine) -> Tensor:
    """The first two answers to one prompt of which no two thirds are equal stand in each other's place."""
    answers, said = engine.tokens[:, engine.prompt :], engine.said(engine.logits)
    pairs = ([4 * prompt, 4 * prompt + other] for prompt in range(ROWS // 4) for other in (1, 2, 3))
    pair = next([a, b] for a, b in pairs if (answers[a] == answers[b]).sum() < ANSWER * 2 // 3)
    said[pair] = said[pair[::-1]]
    return said


def _white(size: float) -> Tensor:
    return size * torch.randn(ROWS, ANSWER, generator=torch.Generator().manual_seed(1))


def _some(engine: Engine, other: Tensor, rows: Any, places: Any = slice(None)) -> Tensor:
    """An honest engine's, but for some rows and places."""
    said = engine.said(engine.logits)
    said[rows, places] = other[rows, places]
    return said


def _theta(config: Any) -> None:
    config.rope_parameters = config.rope_parameters | {"rope_theta": 20_000.0}


PLANTED: dict[str, tuple[Callable[[Engine], Tensor], str]] = {
    "temperature 0.9": (lambda e: e.said(e.logits, 0.9), "temperature 0.9, not of 1"),
    "temperature 1.4": (lambda e: e.said(e.logits, 1.4), "temperature 1.4, not of 1"),
    "temperature 1, declared as 0.7": (lambda e: e.said(e.logits), "temperature 1, not of 0.7"),
    "logits times 0.5": (lambda e: e.said(0.5 * e.logits), "temperature 2, not of 1"),
    "a soft cap of half the largest logit": (lambda e: _capped(e, 0.5), "a soft cap of about 13.9"),
    "a soft cap of twice the largest logit": (lambda e: _capped(e, 2.0), "a soft cap of about 55.5"),
    "two rows of one prompt swapped": (_of_one_prompt_swapped, "2 of 48 rows differ"),
    "three rows of other weights": (lambda e: _some(e, e.said(e.asked(_noise(1.0))), [2, 11, 30]), "3 of 48 rows"),
    "each row another's": (lambda e: e.said(e.logits).roll(5, 0), UNKNOWN),
    "the token before": (lambda e: e.said(e.logits).roll(1, 1), "of the token before each"),
    "the token behind": (lambda e: e.said(e.logits).roll(-1, 1), "of the token behind each"),
    "a BOS in front": (lambda e: e.said(e.asked(front=1)), "texts with a token 1 (BOS) at their beginning"),
    "top-p 0.9, not declared": (lambda e: _of_top_p(e).clamp(min=-50.0), "the tokens that top-p 0.9 leaves"),
    "top-p 0.9, not renormalised": (lambda e: e.said(e.logits), "of all tokens, not of those that top-p"),
    "logarithms of base 2": (lambda e: e.said(e.logits) / math.log(2), "its logarithms have base 2, not e"),
    "the end of an answer": (lambda e: e.said(e.logits) - 3.0 * (e.tokens[:, e.prompt :] == EOS), "special tokens"),
    "the first token": (lambda e: _some(e, e.said(e.logits) - 0.7, slice(None), 0), "the first token of each"),
    "half of another version": (lambda e: _some(e, e.said(e.asked(_noise(0.3))), slice(1, None, 2)), "versions but 1"),
    "other weights": (lambda e: e.said(e.asked(_noise(3.0))), UNKNOWN),
    "weights nearby": (lambda e: e.said(e.asked(_noise(0.05))), UNKNOWN),
    "other rotary embeddings": (lambda e: e.said(e.asked(config=_theta)), UNKNOWN),
    "noise of 0.1": (lambda e: e.said(e.logits) + _white(0.1), UNKNOWN),
    "a number on top": (lambda e: e.said(e.logits) - 0.2, UNKNOWN),
    "clipped at -1": (lambda e: e.said(e.logits).clamp(min=-1.0), UNKNOWN),
    "the most probable token's": (lambda e: e.logits.log_softmax(-1).amax(-1), UNKNOWN),
}
"""What a server has said, and a piece of the sentence about it."""
DECLARED: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "temperature 1, declared as 0.7": lambda e: {"temperature": 0.7},
    "top-p 0.9, declared": lambda e: {"top_p": 0.9} | _sampled(e), "top-p 0.9, not declared": _sampled,
    "top-p 0.9, not renormalised": lambda e: {"top_p": 0.9} | _sampled(e),
    "half of another version": lambda e: {"version": ROWS // 2 * [1, 2]},
}  # fmt: skip
"""Further keys of the rows."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_seen_and_no_wrong_cause_is_named(engine: Engine, tmp_path: Path, name: str) -> None:
    plant, text = PLANTED[name]
    report = engine.certified(name, plant(engine), tmp_path)
    (side,) = report.sides
    told, floor = sentence(side, report), report.floor.mean
    assert side.verdict in ("above the floor", "broken") and text in told and floor is not None
    assert len(side.explanations) == (text != UNKNOWN)
    assert all(each.after < floor for each in side.explanations), "made good, nothing but the floor is left"
    if text == UNKNOWN:
        assert all(each.after > 0.1 * each.before for each in side.tried) and side.tried
        assert ("it hardly follows this model" in told) == side.unrelated
        assert side.unrelated == (name in ("each row another's", "other weights"))
