"""Every form of op has an engine side, and exact mode refuses a model with an op that no hook computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fp8rl.models.forms import OpForm
from fp8rl.models.trace import Forward, Op
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import families
from fp8rl.rollout.engine.plugin.families import EngineFamily, EngineSide, check_forms
from fp8rl.rollout.engine.plugin.hooks import hooks_for, provided
from tests.support.definitions import tiny_models

EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
HASHED = OpForm(name="hash_topk", shapes="logits -> probs, chosen", definition=max)
STRANGE = Forward((), ((Op("topk", HASHED, ("logits",), ("probs", "chosen")),),), ())


def forwards() -> Iterator[Forward]:
    yield from (model.forward for model in tiny_models().values())


@pytest.mark.parametrize("cuda", [False, True])
def test_hooks_compute_every_op_of_the_known_architectures(cuda: bool) -> None:
    for forward in forwards():
        check_forms(forward, provided(hooks_for(EXACT, cuda)))


def test_an_op_that_no_hook_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = provided(hooks_for(EXACT, cuda=False))
    with pytest.raises(RuntimeError, match=r"without an engine side \['hash_topk'\]"):
        check_forms(STRANGE, ours)
    known = {HASHED: EngineSide(lambda *read: read)}
    monkeypatch.setattr(families, "_registered", [EngineFamily(sides=known)])
    with pytest.raises(RuntimeError, match=r"no hook computes by their definition \['hash_topk'\]"):
        check_forms(STRANGE, ours)
    known[HASHED] = replace(known[HASHED], hooked=False)
    check_forms(STRANGE, ours)
    native = provided(hooks_for(replace(EXACT, mode="native"), cuda=False))
    with pytest.raises(RuntimeError, match="attention'"):
        check_forms(next(forwards()), native)
