"""Hooks on SGLang's CUDA branches, where other functions stand under the same names, and an engine's paths there."""

import json
from typing import Any

import pytest

from tests.support.elsewhere import found_elsewhere
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
from tests.support.as_cuda import pretend
pretend()
from tests.support.tiny_model import TinyModel, write_tiny_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import changed_signature
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import hooks
from sglang.srt.utils import is_cuda
from tests.support.cuda_forward import engine_paths
tables = {
    f"{mode} {preset} {rollout}": hooks.hooks_for(
        NumericsConfig(mode=mode, spec=QuantSpec.preset(preset), rollout=rollout), True
    )
    for mode in ("exact", "native")
    for preset in ("fp8_block_pow2", "fp8_block_fp32")
    for rollout in ("fp8", "bf16")
}
every = {hook.path: hook for table in tables.values() for hook in table}
hooks_found = {
    "cuda": is_cuda(),
    "hooks": {name: len(table) for name, table in tables.items()},
    "paths": len(every),
    "problems": [problem for hook in every.values() if (problem := changed_signature(hook.path, hook.parameters))],
}
examples, made, in_fp8, folder = *map(json.loads, sys.argv[1:4]), Path(sys.argv[4])
paths = [Path(name) for name in examples]
for name, sizes in made.items():
    paths.append(folder / "made" / name)
    write_tiny_model(paths[-1], TinyModel(**sizes))
forwards = {path.name: engine_paths(path, folder / "served") for path in paths}
forwards |= {f"{path.name} fp8": engine_paths(path, folder / "served", "fp8") for path in paths if path.name in in_fp8}
print(json.dumps({"hooks": hooks_found, "forwards": forwards}))
"""

TRAINED = [f"tiny_{name}" for name in ("qwen3_moe", "glm", "deepseek", "olmoe", "qwen2", "qwen3_5", "qwen3_next")]
MADE: dict[str, dict[str, Any]] = {
    "dense": {"experts": 0},
    "mixtral": {"family": "mixtral", "hidden": 256},
    "deepseek_without_q_rank": {"family": "deepseek_v3", "q_rank": 0},
    **{each: {"family": each} for each in ("llama", "mistral", "glm4_moe_lite", "glm_moe_dsa", "qwen3_5_moe_text")},
}
IN_FP8 = ["tiny_qwen3_moe", "dense", "tiny_glm", "tiny_deepseek"]
"""Models whose keys and values are also kept in FP8."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    examples = [str(EXAMPLES / "models" / name) for name in TRAINED]
    return found_elsewhere(SCRIPT, *map(json.dumps, (examples, MADE, IN_FP8)), str(tmp_path_factory.mktemp("as_cuda")))


def test_every_hook_finds_its_target_on_cuda(found: Any) -> None:
    found = found["hooks"]
    assert found["cuda"] and found["problems"] == []
    exact = [found["hooks"][f"exact fp8_block_pow2 {each}"] for each in ("fp8", "bf16")]
    assert found["paths"] >= 23 and min(exact) >= 15


@pytest.mark.parametrize("name", [*TRAINED, *MADE, *(f"{each} fp8" for each in IN_FP8)])
def test_a_decode_step_and_the_program_as_it_is_have_the_bits_of_a_prefill_and_no_kernel_of_sglangs_is_called(
    name: str, found: Any
) -> None:
    """Plain and in capture mode; the prefill is lowered."""
    path = found["forwards"][name]
    assert path["called"] == [] and path["differ"] == [] and path["finite"]
    if name in ("tiny_qwen3_moe", "tiny_glm", "tiny_deepseek"):
        assert path["token"] == path["expected"]
