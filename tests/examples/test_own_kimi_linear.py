"""A family of ops in a user's one file, which edits none: a float64 definition's logits, and d = 0 after updates. It
loads, exports, syncs, traces, is planned and watched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.diagnose.doctor.watch import watch_step
from fp8rl.diagnose.explain.compare import ask_engine
from fp8rl.diagnose.explain.differences import op_differences
from fp8rl.models import architecture, load_architecture, read_model, read_shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import job_of
from fp8rl.rl.experiment.budget.memory import engine_memory
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.types import SamplingParams
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.batches import batch_of_answers, cross_entropy, random_batch
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES
from tests.support.rig import make_engine
from tests.support.syncs import push
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.trainers import trainer_on

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("warm_engines")]

FILE = str(EXAMPLES / "own_kimi_linear.py")
NUMERICS = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
LINEAR = {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 2, "head_dim": 128, "short_conv_kernel_size": 4}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "mla_use_nope": True, "vocab_size": 128,
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2, "first_k_dense_replace": 1,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_token": 2,
    "num_shared_experts": 1, "routed_scaling_factor": 2.446, "q_lora_rank": None, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    "max_position_embeddings": 2048, "linear_attn_config": LINEAR,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, draw = tmp_path_factory.mktemp("kimi") / "model", torch.Generator().manual_seed(0)
    write_tiny_model(path, TinyModel(hidden=256))
    tokens = {k: v for k, v in json.loads((path / "config.json").read_text()).items() if k.endswith("token_id")}
    (path / "config.json").write_text(json.dumps(tokens | CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_known", dict(architecture._known))
        load_architecture(FILE)
        tensors = {}
        for name, row in read_model(path).tensors.rows.items():
            x = torch.randn(row.shape, generator=draw)
            values = 1 + 0.2 * x if "norm" in name else x.abs().log1p() if "A_log" in name else 0.08 * x
            tensors[name] = values.to(row.trained)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        yield path


def test_the_logits_are_those_of_a_float64_definition(model: Path, layout: Layout) -> None:
    plain = {"spec": QuantSpec.preset("bf16"), "trainer": "bf16", "rollout": "bf16"}
    trainer = trainer_on(layout, TrainerSection(), model, "bf16", plain, dtype=torch.float32)
    tokens = torch.randint(0, 128, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = trainer.model(tokens, position_ids=None, attention_mask=None)
    t = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    expected = torch.stack([logits(row, t) for row in tokens])
    torch.testing.assert_close(found.view_as(expected).double(), expected, rtol=0, atol=1e-4)


def logits(tokens: Tensor, t: dict[str, Tensor]) -> Tensor:
    x = t["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, t[f"{at}input_layernorm.weight"])
        x = x + (kda if layer + 1 in LINEAR["kda_layers"] else latent)(h, t, f"{at}self_attn.")
        h = norm(x, t[f"{at}post_attention_layernorm.weight"])
        x = x + (experts(h, t, f"{at}block_sparse_moe.") if layer else mlp(h, t, f"{at}mlp.", "gate_proj", "up_proj"))
    return norm(x, t["model.norm.weight"]) @ t["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, CONFIG["rms_norm_eps"])


def mlp(x: Tensor, t: dict[str, Tensor], at: str, gate: str, up: str, down: str = "down_proj") -> Tensor:
    g, u, d = (t[f"{at}{name}.weight"] for name in (gate, up, down))
    return (F.silu(x @ g.T) * (x @ u.T)) @ d.T


def experts(x: Tensor, t: dict[str, Tensor], at: str) -> Tensor:
    scores = (x @ t[f"{at}gate.weight"].T).sigmoid()
    chosen = (scores + t[f"{at}gate.e_score_correction_bias"]).topk(CONFIG["num_experts_per_token"], -1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * CONFIG["routed_scaling_factor"]
    out = mlp(x, t, f"{at}shared_experts.", "gate_proj", "up_proj")
    for e in range(CONFIG["num_experts"]):
        share = (weights * (chosen == e)).sum(-1, keepdim=True)
        out = out + share * mlp(x, t, f"{at}experts.{e}.", "w1", "w3", "w2")
    return out


def latent(x: Tensor, t: dict[str, Tensor], at: str) -> Tensor:
    heads, rank = CONFIG["num_attention_heads"], CONFIG["kv_lora_rank"]
    q = (x @ t[f"{at}q_proj.weight"].T).unflatten(-1, (heads, -1))
    rows = x @ t[f"{at}kv_a_proj_with_mqa.weight"].T
    both = norm(rows[:, :rank], t[f"{at}kv_a_layernorm.weight"]) @ t[f"{at}kv_b_proj.weight"].T
    k, v = both.unflatten(-1, (heads, -1)).split((CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"]), -1)
    k = torch.cat((k, rows[:, None, rank:].expand(-1, heads, -1)), -1)
    out = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), is_causal=True)
    return out.transpose(0, 1).flatten(1) @ t[f"{at}o_proj.weight"].T


def kda(x: Tensor, t: dict[str, Tensor], at: str) -> Tensor:
    heads, width, taps = LINEAR["num_heads"], LINEAR["head_dim"], LINEAR["short_conv_kernel_size"]

    def product(name: str, y: Tensor = x) -> Tensor:
        return y @ t[f"{at}{name}_proj.weight"].T

    def convolved(name: str) -> Tensor:
        padded = F.pad(product(name).T[None], (taps - 1, 0))
        mixed = F.conv1d(padded, t[f"{at}{name}_conv1d.weight"], groups=heads * width)
        return F.silu(mixed)[0].T.unflatten(-1, (heads, width))

    q, k, v = map(convolved, "qkv")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    decay = F.softplus(product("f_b", product("f_a")) + t[f"{at}dt_bias"]).unflatten(-1, (heads, width))
    g, beta = -t[f"{at}A_log"].flatten().exp()[:, None] * decay, product("b").sigmoid()
    state, found = x.new_zeros(heads, width, width), []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp()[:, :, None] * state
        update = beta_t[:, None] * (v_t - torch.einsum("hk,hkv->hv", k_t, state))
        state = state + k_t[:, :, None] * update[:, None]
        found.append(torch.einsum("hk,hkv->hv", q_t, state) / width**0.5)
    gates = product("g_b", product("g_a")).unflatten(-1, (heads, width))
    out = norm(torch.stack(found), t[f"{at}o_norm.weight"]) * gates.sigmoid()
    return out.flatten(1) @ t[f"{at}o_proj.weight"].T


def test_its_formats_and_its_cache_are_as_planned_and_native_mode_is_refused(model: Path, layout: Layout) -> None:
    trainer, batch = trainer_on(layout, TrainerSection(), model), random_batch(rows=4, longest=40)
    sightings = watch_step(trainer, batch, cross_entropy(batch), NUMERICS, trainer.config)
    assert differences_of(sightings) == []
    assert {each.key for each in sightings} >= {"scores.output", "attention.output", "product.activation"}
    shape = read_shape(model)
    job = job_of(experiment(model={"path": str(model), "architecture": FILE}), shape, "kernels", 80e9)
    assert engine_memory(replace(job, kv_tokens=100)).held["KV cache"]["rollout"] == 100 * shape.kv_bytes()
    with pytest.raises(UserError, match=r"numerics\.mode: found 'native, on megatron, with a model of kda attention'"):
        trainer_on(layout, TrainerSection(), model, numerics={"mode": "native"})


def test_the_engine_gives_the_trainers_bits_after_each_update(model: Path, layout: Layout, tmp_path: Path) -> None:
    from fp8rl.trainer.op_trace import trace_ops

    trainer = trainer_on(layout, TrainerSection(lr=1e-3, warmup_steps=0), model)
    exported, stored = dict(trainer.weights.share(trainer.model)), load_file(model / "model.safetensors")
    assert exported.keys() == stored.keys() and all(exported[name].equal(stored[name]) for name in stored)
    convert_checkpoint(model, tmp_path / "served", NUMERICS.rollout_spec)
    plugin = {"numerics": NUMERICS.to_dict(), "architecture": FILE}
    expected = expected_report(NUMERICS, architecture=FILE)
    with asyncio.Runner() as runner:
        engine = make_engine(tmp_path / "engine.log", NUMERICS, plugin=plugin, expected=expected)
        endpoint = runner.run(engine.start(tmp_path / "served", 0))
        try:
            for step in range(3):
                prompts = torch.randint(6, 128, (4, 70), generator=torch.Generator().manual_seed(step)).tolist()
                asked = engine.complete(prompts, SamplingParams(20, temperature=1.0), range(4))
                batch = batch_of_answers(prompts, runner.run(asked))
                rows, scored = trainer.score(batch)
                d = (scored - batch.fields["rollout_logprobs"][rows])[batch.loss_mask[rows]]
                assert len(d) > 40 and not d.any()
                trace = trace_ops(trainer, batch)
                found = op_differences(trainer.definition.forward, 4, trace, runner.run(ask_engine(engine, trace)))
                assert {each.differing for each in found} == {0.0}
                assert [each.layer for each in found if each.op == "delta"] == [0, 1]
                trainer.train_step(batch, cross_entropy(batch))
                problems = push(trainer, TensorTransport(1 << 20), NUMERICS.rollout_spec, [endpoint], step + 1)[2]
                assert problems == []
            (memory,) = runner.run(engine.memory())
            states = memory.kv_cache - read_shape(model).kv_bytes() * (16384 + 1)
            assert states > 0 and states % read_shape(model).request_bytes() == 0, "beside the latents of one layer"
        finally:
            runner.run(engine.stop())
