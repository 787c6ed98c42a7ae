"""The specs for real models in examples/: what their ranks would hold, parameter by parameter, without a weight."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fp8rl.models import read_model
from fp8rl.rl.experiment import load_experiment
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.state_bytes import buffers
from tests.support.meta_model import Held, parameters_of
from tests.support.paths import CONFIGS, EXAMPLES, REAL_SPECS

BLOCK, PLACE = 128, 64
"""Elements of a quantization block, and those at whose multiples a parameter begins in Megatron's buffers."""
CONFIG_OF = {
    "qwen3_4b_one_gpu": "qwen3_4b",
    "qwen3_4b_lora_one_gpu": "qwen3_4b",
    "qwen3_30b_a3b_lora_one_gpu": "qwen3_30b_a3b",
    "qwen3_5_35b_a3b_lora_one_gpu": "qwen3_5_35b_a3b",
    "qwen3_5_4b_one_gpu": "qwen3_5_4b",
    "qwen3_5_9b_lora_one_gpu": "qwen3_5_9b",
}


@pytest.mark.slow
@pytest.mark.parametrize("example", REAL_SPECS)
def test_every_rank_holds_its_part_of_every_tensor_in_whole_blocks(example: str, tmp_path: Path) -> None:
    """The last rank of each stage, whose experts are the last ones."""
    directory = CONFIGS / CONFIG_OF.get(example, example)
    experiment, model = load_experiment(EXAMPLES / f"planned/{example}.yaml"), read_model(directory)
    config, numerics, table = experiment.trainer, experiment.numerics_config(), model.tensors
    seen: set[str] = set()
    for stage in range(config.pp):
        rank = (stage + 1) * config.tp * config.dp - 1
        held = parameters_of(directory, experiment.to_dict(), rank, tmp_path)
        for each in held:
            rows = [table[name] for name in each.tensors]
            ranks = config.tp if each.split is not None else 1
            rest = rows[0].shape[1:]  # Megatron holds matrices
            whole = [sum(row.shape[0] for row in rows), *([math.prod(rest)] if rest else [])]
            if each.split is not None:
                whole[each.split] //= config.tp
            assert each.shape == tuple(whole), each
            if any(model.quantizes(row, numerics.trainer_spec) for row in rows):
                assert each.split != 0 or all(row.shape[0] // ranks % BLOCK == 0 for row in rows), each
                # The last block of kv_a_proj's rows is half a one; nothing lies behind it.
                sizes = [size for row in rows for size in row.shape if row.kind != "kv_a_proj"]
                assert all(size % BLOCK == 0 for size in (*sizes, each.shape[1])), each
        # As the planner counts them, to the element.
        counted = buffers(model.shape, config, numerics.trainer_spec, "torch", stage)
        places = (-(-_size(each) // PLACE) * PLACE for each in held)
        assert sum(places) == sum(buffer.elements for buffer in counted)
        seen |= {name for each in held for name in each.tensors}
    others = {name for name, row in table.rows.items() if not row.megatron.buffer} - seen
    at = Layout.of(config.world_size - 1, config)
    mine = range(model.sizes.experts // config.ep * at.ep_rank, model.sizes.experts // config.ep * (at.ep_rank + 1))
    assert {row.expert for row in map(table.__getitem__, others)} == {*range(model.sizes.experts)} - {*mine}


def _size(held: Held) -> int:
    size = 1
    for each in held.shape:
        size *= each
    return size
