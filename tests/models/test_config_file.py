"""What is read of a config.json, with transformers as the oracle of defaults, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fp8rl.models import ModelSizes, read_model
from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.ops.rope import Llama3
from tests.support.paths import EXAMPLES

COMMON = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "max_position_embeddings": 512,
}
DENSE = {**COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN2 = {**COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MOE = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
OLMOE = {**COMMON, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 64}
MIXTRAL = {**COMMON, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
GLM = {
    **COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {**COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
GLM_5 = {
    **COMMON,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
NEXT = {**COMMON, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 8}
QWEN35_MOE = NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
QWEN35 = NEXT | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_key_value_heads": 4}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_sizes(path: Path, key: str = "model.path") -> ModelSizes:
    return read_model(path, key).sizes


def refusal(path: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read_sizes(write(path, config))
    text = str(error.value)
    assert text.startswith("model.path") and "found " in text and "expected " in text and text.endswith(".")
    return text


@pytest.mark.parametrize("base", [DENSE, QWEN2, MOE])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ],
)
def test_values_and_defaults_are_those_of_transformers(
    base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = read_sizes(write(tmp_path, base | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert sizes.kv_heads == theirs.num_key_value_heads
    assert sizes.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert sizes.norm_eps == theirs.rms_norm_eps
    assert sizes.rope_theta == theirs.rope_parameters["rope_theta"]
    assert sizes.tied == theirs.tie_word_embeddings
    if base is MOE:
        assert (sizes.experts, sizes.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert sizes.expert_size == theirs.moe_intermediate_size and sizes.renormalize == theirs.norm_topk_prob
    else:
        assert sizes.ffn_size == theirs.intermediate_size and not sizes.moe


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": None, "num_experts_per_tok": 4}, {"rope_theta": 5e5}])
def test_values_and_defaults_of_olmoe_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = read_sizes(write(tmp_path, OLMOE | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (sizes.experts, sizes.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert sizes.expert_size == theirs.intermediate_size and sizes.renormalize == theirs.norm_topk_prob
    assert sizes.kv_heads == theirs.num_key_value_heads and sizes.head_dim == 256 // 64
    assert sizes.norm_eps == theirs.rms_norm_eps and sizes.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("base", [NEXT, QWEN35_MOE, QWEN35])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"full_attention_interval": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "head_dim": 128},
        {"layer_types": ["linear_attention", "full_attention"] * 4, "linear_key_head_dim": 64, "top_k": 2},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            }
        },
    ],
)
def test_values_and_defaults_of_linear_attention_are_those_of_transformers(
    base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = read_sizes(write(tmp_path, base | changes))
    theirs, own = AutoConfig.from_pretrained(tmp_path), sizes.of(GatedDelta)
    kinds = ["linear_attention" if layer in own.layers else "full_attention" for layer in range(sizes.layers)]
    assert kinds == theirs.layer_types and sizes.head_dim == theirs.head_dim
    assert (own.key_heads, own.value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (own.key_dim, own.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert own.taps == theirs.linear_conv_kernel_dim and sizes.kv_heads == theirs.num_key_value_heads
    assert sizes.rotary_dim == sizes.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert sizes.rope_theta == theirs.rope_parameters["rope_theta"] and sizes.norm_eps == theirs.rms_norm_eps
    if base is QWEN35:
        assert sizes.ffn_size == theirs.intermediate_size and not sizes.moe
    else:
        assert (sizes.experts, sizes.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert sizes.expert_size == theirs.moe_intermediate_size
        assert sizes.shared_size == theirs.shared_expert_intermediate_size and sizes.renormalize


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads in .*: found 24, expected a multiple of .* = 16"),
        ({"full_attention_interval": 0}, "full_attention_interval in .*: found 0, expected a positive integer"),
        (
            {"full_attention_interval": 2, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
            "full_attention_interval in .*: found 2, expected 4, as layer_types has it",
        ),
        (
            {"layer_types": ["full_attention"] + ["linear_attention"] * 7},
            "layer_types in .*'full_attention' in each layer of a fixed number",
        ),
        ({"layer_types": ["sliding_attention"] * 8}, "expected .*'linear_attention' or 'full_attention' in every"),
        ({"attn_output_gate": False}, "attn_output_gate in .*: found False, expected True"),
        ({"partial_rotary_factor": 0.001}, "partial_rotary_factor in .*expected one part of head_dim = 256"),
    ],
)
def test_linear_attention_that_is_not_defined_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert re.search(message, refusal(tmp_path, NEXT | changes))


WHOLE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {}}
TEXT = {key: value for key, value in QWEN35_MOE.items() if key != "architectures"}


def test_the_text_of_a_checkpoint_with_a_tower_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    whole = WHOLE | {"text_config": TEXT, "tie_word_embeddings": True, "image_token_id": 7, "video_token_id": 9}
    sizes = read_sizes(write(tmp_path, whole))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert sizes.layers == theirs.text_config.num_hidden_layers and sizes.experts == theirs.text_config.num_experts
    assert sizes.tied and theirs.tie_word_embeddings and sizes.picture_tokens == (7, 9)
    assert sizes.tower == "Qwen3_5MoeForConditionalGeneration" and sizes.keeps("model.visual.patch_embed.proj.weight")
    alone = read_sizes(write(tmp_path, QWEN35_MOE | {"tie_word_embeddings": True}))
    assert replace(sizes, tower="", kept=alone.kept, picture_tokens=()) == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config in .*: found None, expected the configuration of its model of text"),
        ({"model_type": "qwen3_vl_moe"}, "model_type in .*: found 'qwen3_vl_moe', expected 'qwen3_5_moe'"),
        ({"text_config": TEXT | {"model_type": "llama"}}, "model_type in text_config of .*: found 'llama'"),
        (
            {"text_config": TEXT | {"tie_word_embeddings": False}, "tie_word_embeddings": True},
            "text_config.tie_word_embeddings in .*: found False, expected True, as beside text_config",
        ),
        ({"text_config": TEXT | {"linear_num_value_heads": 24}}, "linear_num_value_heads in text_config of .*found 24"),
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"]},
            "architectures in .*'Qwen3VLForConditionalGeneration'",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config in text_config of .*'awq'"),
    ],
)
def test_a_checkpoint_with_a_tower_that_is_not_defined_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert re.search(message, refusal(tmp_path, WHOLE | {"text_config": TEXT} | changes))


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 64, "num_experts_per_tok": 4}, {"rope_theta": 5e5}])
def test_values_and_defaults_of_mixtral_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = read_sizes(write(tmp_path, MIXTRAL | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (sizes.experts, sizes.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert sizes.expert_size == theirs.intermediate_size and sizes.kv_heads == theirs.num_key_value_heads
    assert sizes.norm_eps == theirs.rms_norm_eps and sizes.rope_theta == theirs.rope_parameters["rope_theta"]
    assert sizes.head_dim == 256 // 64 and sizes.renormalize


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": False},
        {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 3, "num_hidden_layers": 4},
        {"head_dim": 128, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ],
)
def test_values_and_defaults_of_glm_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = read_sizes(write(tmp_path, GLM | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    router = sizes.sigmoid_router
    assert router is not None and (router.groups, router.kept_groups) == (theirs.n_group, theirs.topk_group)
    assert router.factor == theirs.routed_scaling_factor and sizes.renormalize == theirs.norm_topk_prob
    assert (sizes.experts, sizes.top_k) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    assert sizes.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert sizes.dense_layers == theirs.first_k_dense_replace and sizes.norm_eps == theirs.rms_norm_eps
    assert sizes.qkv_bias == theirs.attention_bias and (sizes.head_norms is not None) == theirs.use_qk_norm
    assert sizes.rotary_dim == sizes.head_dim * theirs.rope_parameters["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {}),
        (LLAMA, {"head_dim": 64, "num_key_value_heads": 8, "rope_parameters": LLAMA3}),
        (LLAMA, {"rope_theta": 5e5, "rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}}),
        (MISTRAL, {}),
        (MISTRAL, {"head_dim": None, "num_key_value_heads": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    ],
)
def test_values_and_defaults_of_llama_and_mistral_are_those_of_transformers(
    base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = read_sizes(write(tmp_path, base | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (sizes.kv_heads, sizes.norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert sizes.head_dim == (theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads)
    rope, scaling = theirs.rope_parameters, sizes.rope_scaling
    assert sizes.rope_theta == rope["rope_theta"] and (scaling is None) == (rope["rope_type"] == "default")
    assert scaling is None or scaling == Llama3(factor=8.0, original=64, low=1.0, high=4.0)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "joined"), [(128, 8, 1), (64, 8, 2), (64, 1, 1), (32, 8, 4), (96, 8, 1)]
)
def test_heads_lie_together_where_they_fill_a_block(head_dim: int, kv_heads: int, joined: int, tmp_path: Path) -> None:
    heads = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    for config in (LLAMA, QWEN2, DENSE):
        assert read_sizes(write(tmp_path, config | heads)).joined == joined


@pytest.mark.parametrize(
    ("name", "architecture"), [("glm4_moe_lite", "Glm4MoeLiteForCausalLM"), ("deepseek_v3", "DeepseekV3ForCausalLM")]
)
def test_norms_and_rotation_of_latent_attention_have_the_defaults_of_transformers(
    name: str, architecture: str, tmp_path: Path
) -> None:
    sizes = read_sizes(write(tmp_path, {**GLM_5, "model_type": name, "architectures": [architecture]}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (sizes.norm_eps, sizes.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])


@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_rows_of_an_indexer_end_where_it_chooses_all_keys(name: str, tmp_path: Path) -> None:
    architecture = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}[name]
    base = {**GLM_5, "model_type": name, "architectures": [architecture]}
    sizes = read_sizes(write(tmp_path, base))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert sizes.max_positions == theirs.index_topk == 2048 and sizes.limit.startswith("index_topk (")
    assert sizes.norm_eps == theirs.rms_norm_eps and sizes.dense_layers == 1
    assert sizes.keeps("model.layers.0.self_attn.indexer.wk.weight") and not sizes.keeps("model.layers.0.self_attn.x")
    short = read_sizes(write(tmp_path, base | {"index_topk": 512, "layer_types": ["deepseek_sparse_attention"] * 2}))
    assert short.max_positions == 512
    whole = read_sizes(write(tmp_path, base | {"max_position_embeddings": 2048}))
    assert (whole.max_positions, whole.limit) == (2048, "max_position_embeddings")


@pytest.mark.parametrize("base", [DENSE, MOE])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "or FP8 by blocks"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "'weight_block_size': [128, 128]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "'fmt': 'e4m3'"),
        ({"compression_config": {"format": "int-quantized"}}, "BF16 checkpoint"),
        ({"rope_parameters": YARN}, "rope_parameters.rope_type"),
        ({"rope_scaling": YARN}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": PLAIN, "rope_scaling": YARN}, "rope_scaling.rope_type"),
        ({"rope_parameters": YARN, "rope_scaling": PLAIN}, "rope_parameters.rope_type"),
        ({"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": PLAIN | {"mrope_section": [16, 24, 24]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": {"full_attention": PLAIN}}, "rope_parameters.full_attention"),
        ({"rope_parameters": PLAIN, "rope_theta": 1e6}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"model_type": "llama"}, "model_type"),
        ({"architectures": ["PhiForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_what_the_shared_ops_do_not_define_is_refused(
    base: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert named in refusal(tmp_path, base | changes)


REFUSED = (
    (
        QWEN2,
        [
            ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type"),
            ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ],
    ),
    (
        OLMOE,
        [
            ({"clip_qkv": 8.0}, "clip_qkv"),
            ({"norm_topk_prob": True}, "norm_topk_prob"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings"),
            ({"sliding_window": 4096}, "sliding_window"),
            ({"attention_bias": True}, "attention_bias"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
            ({"num_key_value_heads": 8}, "num_key_value_heads in .*found 8, expected 64.*SGLang"),
            ({"rms_norm_eps": 1e-6}, "rms_norm_eps in .*found 1e-06, expected 1e-05.*SGLang"),
            ({"head_dim": 128}, "head_dim in .*found 128, expected 4.*SGLang"),
            ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ],
    ),
    (
        MIXTRAL,
        [
            ({"sliding_window": 4096}, "sliding_window"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings"),
            ({"head_dim": 128}, "head_dim in .*found 128, expected 4.*SGLang"),
            ({"rope_theta": 10000.5}, "rope_theta in .*found 10000.5, expected 10000.*SGLang"),
            ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ],
    ),
    (
        GLM,
        [
            ({"n_group": 3}, "n_group in .*found 3, expected a divisor of n_routed_experts = 16"),
            ({"n_group": 16}, "n_group in .*found 16.* two of them or more"),
            ({"n_group": 2, "topk_group": 3}, "topk_group in .*found 3, expected at most n_group = 2"),
            ({"n_group": 8, "num_experts_per_tok": 4}, "num_experts_per_tok in .*found 4, expected at most 2"),
            ({"first_k_dense_replace": 9}, "first_k_dense_replace"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            (
                {"use_sliding_window": True, "sliding_window": 4096},
                "use_sliding_window in .*found True, expected False",
            ),
            ({"partial_rotary_factor": 0.25}, "partial_rotary_factor in .*expected one part"),
            ({"rope_parameters": PLAIN | {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
            ({"rope_parameters": YARN}, "rope_type"),
        ],
    ),
    (
        LLAMA,
        [
            ({"attention_bias": True}, "attention_bias in .*found True, expected False"),
            ({"mlp_bias": True}, "mlp_bias in .*found True, expected False"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type in .*'default' or 'llama3'"),
            ({"rope_parameters": YARN}, "rope_parameters.rope_type in .*found 'yarn', expected 'default' or 'llama3'"),
            ({"rope_parameters": LLAMA3 | {"beta_fast": 32}}, "rope_parameters.beta_fast in .*expected no such key"),
            ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor in .*a positive number"),
            ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor in .*less than high_freq_factor"),
        ],
    ),
    (
        MISTRAL,
        [
            ({"sliding_window": 4096}, "sliding_window in .*found 4096, expected null.*no windows"),
            ({"attention_bias": True}, "attention_bias"),
        ],
    ),
    (
        {key: value for key, value in MISTRAL.items() if key != "sliding_window"},
        [({}, "sliding_window in .*found 4096, expected null")],
    ),
    (
        GLM_5,
        [
            ({"index_topk": None}, "index_topk in .*found None"),
            ({"attention_bias": True}, "attention_bias"),
            ({"moe_layer_freq": 2}, "moe_layer_freq in .*found 2, expected 1"),
            ({"scoring_func": None}, "scoring_func in .*found None, expected 'sigmoid', which the engine"),
            ({"layer_types": ["full_attention"] * 2}, "layer_types in .*'deepseek_sparse_attention' in every layer"),
        ],
    ),
    (
        MOE,
        [
            ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
            ({"mlp_only_layers": [1]}, "mlp_only_layers"),
            ({"num_local_experts": 4}, "num_experts"),
            ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
            ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ],
    ),
)
"""Variants of each architecture that the shared ops or SGLang's own model do not define, and what the refusal says."""


@pytest.mark.parametrize(("base", "changes", "named"), [(base, *case) for base, cases in REFUSED for case in cases])
def test_variants_of_an_architecture_are_refused(
    base: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert re.search(named, refusal(tmp_path, base | changes))


def test_weights_in_fp8_by_blocks_make_no_other_sizes(tmp_path: Path) -> None:
    assert read_sizes(write(tmp_path, MOE | {"quantization_config": FP8})) == read_sizes(write(tmp_path, MOE))


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "rope_scaling": None,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0, "factor": None},
        "mlp_only_layers": [],
        "quantization_config": None,
    }
    assert read_sizes(write(tmp_path, MOE | neutral)) == read_sizes(write(tmp_path, MOE))


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MODEL: found .* without config.json"):
        read_sizes(tmp_path, "MODEL")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="JSON object"):
        read_sizes(tmp_path)


@pytest.mark.parametrize("found", ["linear", [1.0], 5, True, 1e308])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_rotation_that_is_none_is_refused_in_every_architecture(tmp_path: Path, place: str, found: object) -> None:
    for path in sorted((EXAMPLES / "models").glob("*/config.json")):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(path.read_text()) | {place: found}))
        with pytest.raises(UserError, match=place):
            read_model(tmp_path)


def test_a_part_of_a_head_that_no_number_of_channels_is(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "models/tiny_glm/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"partial_rotary_factor": 1e308}))
    with pytest.raises(UserError, match="partial_rotary_factor"):
        read_model(tmp_path)
