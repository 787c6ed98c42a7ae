"""The hook table on SGLang's CUDA branches, where other functions stand under the same names, and a forward there."""

import json

import pytest

from tests.support.elsewhere import found_elsewhere
from tests.support.paths import EXAMPLES

HOOKS = """
import json
from tests.support.as_cuda import pretend
pretend()
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import hooks
from sglang.srt.layers.moe import topk
from sglang.srt.utils import is_cuda
tables = {
    f"{mode} {preset} {rollout}": hooks.hooks_for(
        NumericsConfig(mode=mode, spec=QuantSpec.preset(preset), rollout=rollout), True
    )
    for mode in ("exact", "native")
    for preset in ("fp8_block_pow2", "fp8_block_fp32")
    for rollout in ("fp8", "bf16")
}
every = {hook.path: hook for table in tables.values() for hook in table}
print(json.dumps({
    "cuda": is_cuda(),
    "hooks": {name: len(table) for name, table in tables.items()},
    "paths": len(every),
    "problems": [problem for hook in every.values() if (problem := hooks._problem(hook))],
    "routers": [topk.biased_grouped_topk.__name__, topk.fused_topk.__name__],
}))
"""


@pytest.mark.slow
def test_every_hook_finds_its_target_on_cuda() -> None:
    found = found_elsewhere(HOOKS)
    assert found["cuda"] and found["problems"] == []
    assert found["paths"] >= 35 and all(
        found["hooks"][f"exact fp8_block_pow2 {each}"] >= 30 for each in ("fp8", "bf16")
    )
    assert found["routers"] == ["biased_grouped_topk_gpu", "fused_topk"], "the functions of a GPU, under their names"


FORWARDS = """
import json, sys
from pathlib import Path
from tests.support.as_cuda import called, pretend
pretend()
from tests.support.cuda_forward import first_token
names, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
found = {}
for name in names:
    called.clear()
    token, expected = first_token(Path(name), folder)
    found[name] = {"called": list(called), "token": token, "expected": expected}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_forward_on_cuda_calls_no_kernel_of_sglangs_packages(tmp_path) -> None:
    """Of a mixture of Qwen3's, of GLM-4.5 and of a DeepSeek: whatever computes is a hook, and answers as it should."""
    names = [str(EXAMPLES / f"models/tiny_{name}") for name in ("qwen3_moe", "glm", "deepseek")]
    found = found_elsewhere(FORWARDS, json.dumps(names), str(tmp_path))
    assert {name: each["called"] for name, each in found.items()} == {name: [] for name in names}
    assert all(each["token"] == each["expected"] for each in found.values()), found
