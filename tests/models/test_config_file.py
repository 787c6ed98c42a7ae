"""What is read of a config.json, with transformers as the oracle of defaults, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fp8rl.models import ModelSizes, read_model
from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.ops.rope import Llama3
from tests.support.paths import CONFIGS, EXAMPLES

COMMON = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 64, "max_position_embeddings": 512}


def base(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, "architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **more}


DENSE, QWEN2, LLAMA = base("Qwen3", "qwen3"), base("Qwen2", "qwen2"), base("Llama", "llama")
MOE = base("Qwen3Moe", "qwen3_moe", moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
OLMOE, MIXTRAL = base("Olmoe", "olmoe", num_experts=64), base("Mixtral", "mixtral", num_local_experts=8)
ROUTED = {"moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4}
HALF = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
GLM = base("Glm4Moe", "glm4_moe", **ROUTED, rope_parameters=HALF)
MISTRAL = base("Mistral", "mistral", sliding_window=None)
GLM_5 = base("GlmMoeDsa", "glm_moe_dsa", **ROUTED) | {"max_position_embeddings": 8192, "n_group": 1, "topk_group": 1}
GLM_5 |= {"n_shared_experts": 1, "q_lora_rank": 128, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 128}
GLM_5 |= {"qk_rope_head_dim": 64, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
GLM_5 |= {"first_k_dense_replace": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
NEXT = base("Qwen3Next", "qwen3_next", num_hidden_layers=8)
QWEN35_MOE = NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
QWEN35 = NEXT | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_key_value_heads": 4}
TEXT = {key: value for key, value in QWEN35_MOE.items() if key != "architectures"}
WHOLE = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {}}
WHOLE |= {"text_config": TEXT}
DEEPSEEK = json.loads((CONFIGS / "deepseek_v3/config.json").read_text())
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_sizes(path: Path, key: str = "model.path") -> ModelSizes:
    return read_model(path, key).sizes


def first(config: Any, *names: str) -> Any:
    """The first of these values that a configuration has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


HEADS = {"num_key_value_heads": 8, "head_dim": 64}
LINEAR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "head_dim": 128}
MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((each, {}) for each in (DENSE, QWEN2, MOE, OLMOE, MIXTRAL, GLM, LLAMA, MISTRAL, NEXT, QWEN35_MOE, QWEN35)),
    *((each, {**HEADS, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}) for each in (DENSE, QWEN2, MOE)),
    *((each, {"rope_theta": 5e5}) for each in (DENSE, QWEN2, MOE, OLMOE, MIXTRAL)),
    *((each, {"rope_theta": 5e5, "rope_scaling": None}) for each in (DENSE, QWEN2, MOE)),
    *((each, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}) for each in (DENSE, QWEN2, MOE)),
    *((each, {"rope_scaling": {"type": "default", "rope_theta": 5e5}}) for each in (DENSE, QWEN2, MOE)),
    (OLMOE, {"num_key_value_heads": None, "num_experts_per_tok": 4}),
    (MIXTRAL, {"num_key_value_heads": 64, "num_experts_per_tok": 4}),
    (
        GLM,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    (GLM, {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 3, "num_hidden_layers": 4}),
    (GLM, {"head_dim": 128, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    (LLAMA, {**HEADS, "rope_parameters": LLAMA3}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}}),
    (MISTRAL, {"head_dim": None, "num_key_value_heads": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    *((each, {"full_attention_interval": 3, **LINEAR_HEADS}) for each in (NEXT, QWEN35_MOE, QWEN35)),
    *((each, {"layer_types": ["linear_attention", "full_attention"] * 4}) for each in (NEXT, QWEN35_MOE, QWEN35)),
    *((each, {"linear_key_head_dim": 64, "rope_parameters": HALF | MROPE}) for each in (NEXT, QWEN35_MOE, QWEN35)),
    *(
        (GLM_5, {"architectures": [f"{name}ForCausalLM"], "model_type": kind})
        for name, kind in (("Glm4MoeLite", "glm4_moe_lite"), ("DeepseekV3", "deepseek_v3"))
    ),
]


@pytest.mark.parametrize(("config", "changes"), ACCEPTED)
def test_values_and_defaults_are_those_of_transformers(
    config: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = read_sizes(write(tmp_path, config | changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    rope, scaling = theirs.rope_parameters, sizes.rope_scaling
    assert (sizes.norm_eps, sizes.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert sizes.rope_theta == rope["rope_theta"] and (scaling is None) == (rope["rope_type"] == "default")
    assert scaling is None or scaling == Llama3(factor=8.0, original=64, low=1.0, high=4.0)
    if config is not GLM_5:  # its heads share one latent row
        assert sizes.kv_heads == theirs.num_key_value_heads
        assert sizes.head_dim == (first(theirs, "head_dim") or theirs.hidden_size // theirs.num_attention_heads)
        assert sizes.rotary_dim == sizes.head_dim * rope.get("partial_rotary_factor", 1)
    experts = first(theirs, "num_experts", "n_routed_experts", "num_local_experts")
    assert sizes.moe == bool(experts)
    if experts:
        assert (sizes.experts, sizes.top_k) == (experts, theirs.num_experts_per_tok)
        assert sizes.expert_size == first(theirs, "moe_intermediate_size", "intermediate_size")
        assert sizes.renormalize == getattr(theirs, "norm_topk_prob", True)
    else:
        assert sizes.ffn_size == theirs.intermediate_size
    if config is GLM:
        router = sizes.sigmoid_router
        assert router is not None and (router.groups, router.kept_groups) == (theirs.n_group, theirs.topk_group)
        assert router.factor == theirs.routed_scaling_factor and sizes.dense_layers == theirs.first_k_dense_replace
        assert sizes.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
        assert sizes.qkv_bias == theirs.attention_bias and (sizes.head_norms is not None) == theirs.use_qk_norm
    if config in (NEXT, QWEN35_MOE, QWEN35):
        own = sizes.of(GatedDelta)
        kinds = ["linear_attention" if layer in own.layers else "full_attention" for layer in range(sizes.layers)]
        assert kinds == theirs.layer_types and own.taps == theirs.linear_conv_kernel_dim
        assert (own.key_heads, own.value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
        assert (own.key_dim, own.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
        assert not experts or sizes.shared_size == theirs.shared_expert_intermediate_size


def test_the_text_of_a_checkpoint_with_a_tower_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    whole = WHOLE | {"tie_word_embeddings": True, "image_token_id": 7, "video_token_id": 9}
    sizes = read_sizes(write(tmp_path, whole))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert sizes.layers == theirs.text_config.num_hidden_layers and sizes.experts == theirs.text_config.num_experts
    assert sizes.tied and theirs.tie_word_embeddings and sizes.picture_tokens == (7, 9)
    assert sizes.tower == "Qwen3_5MoeForConditionalGeneration" and sizes.keeps("model.visual.patch_embed.proj.weight")
    alone = read_sizes(write(tmp_path, QWEN35_MOE | {"tie_word_embeddings": True}))
    assert replace(sizes, tower="", kept=alone.kept, picture_tokens=()) == alone


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "joined"), [(128, 8, 1), (64, 8, 2), (64, 1, 1), (32, 8, 4), (96, 8, 1)]
)
def test_heads_lie_together_where_they_fill_a_block(head_dim: int, kv_heads: int, joined: int, tmp_path: Path) -> None:
    heads = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    for config in (LLAMA, QWEN2, DENSE):
        assert read_sizes(write(tmp_path, config | heads)).joined == joined


@pytest.mark.parametrize(("architecture", "name"), [("GlmMoeDsa", "glm_moe_dsa"), ("DeepseekV32", "deepseek_v32")])
def test_rows_of_an_indexer_end_where_it_chooses_all_keys(architecture: str, name: str, tmp_path: Path) -> None:
    config = GLM_5 | {"model_type": name, "architectures": [f"{architecture}ForCausalLM"]}
    sizes = read_sizes(write(tmp_path, config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert sizes.max_positions == theirs.index_topk == 2048 and sizes.limit.startswith("index_topk (")
    assert sizes.norm_eps == theirs.rms_norm_eps and sizes.dense_layers == 1
    assert sizes.keeps("model.layers.0.self_attn.indexer.wk.weight") and not sizes.keeps("model.layers.0.self_attn.x")
    short = read_sizes(write(tmp_path, config | {"index_topk": 512, "layer_types": ["deepseek_sparse_attention"] * 2}))
    assert short.max_positions == 512
    whole = read_sizes(write(tmp_path, config | {"max_position_embeddings": 2048}))
    assert (whole.max_positions, whole.limit) == (2048, "max_position_embeddings")


LINEAR = {"type": "linear", "factor": 2.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4096}
OF_DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
OF_DEEPSEEK |= {"mscale_all_dim": 1.0}
TWO_INTERVALS = {"full_attention_interval": 2, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
UNTIED = TEXT | {"tie_word_embeddings": False}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"quantization_config": {"quant_method": "fp8"}}, "or FP8 in blocks"),
    (DENSE, {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "'weight_block_size': .128, 128."),
    (DENSE, {"quantization_config": FP8 | {"fmt": "e5m2"}}, "'fmt': 'e4m3'"),
    (DENSE, {"compression_config": {"format": "int-quantized"}}, "BF16 checkpoint"),
    (DENSE, {"rope_parameters": YARN}, "rope_parameters.rope_type"),
    *((each, {"rope_parameters": HALF}, "rope_parameters.partial_rotary_factor") for each in (DENSE, LLAMA, GLM_5)),
    *((each, {"partial_rotary_factor": 0.5}, "partial_rotary_factor in .*0.5, expected 1") for each in (LLAMA, GLM_5)),
    (DENSE, {"rope_parameters": PLAIN | {"mrope_section": [16, 24, 24]}}, "rope_parameters.mrope_section"),
    (DENSE, {"rope_parameters": {"full_attention": PLAIN}}, "rope_parameters.full_attention"),
    (DENSE, {"rope_parameters": PLAIN, "rope_theta": 1e6}, "rope_theta"),
    (DENSE, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    *((each, {"attention_bias": True}, "attention_bias") for each in (DENSE, OLMOE, MISTRAL, GLM_5)),
    (DENSE, {"hidden_act": "gelu"}, "hidden_act"),
    (DENSE, {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    (DENSE, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    (DENSE, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (DENSE, {"head_dim": 63}, "head_dim"),
    (DENSE, {"architectures": ["PhiForCausalLM"]}, "Qwen3MoeForCausalLM"),
    (DENSE, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (QWEN2, WINDOWS, "use_sliding_window"),
    (QWEN2, {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
    *((OLMOE, {key: value}, key) for key, value in (("clip_qkv", 8.0), ("norm_topk_prob", True))),
    *((each, {"tie_word_embeddings": True}, "tie_word_embeddings") for each in (OLMOE, MIXTRAL)),
    (OLMOE, {"num_key_value_heads": 8}, "num_key_value_heads in .*found 8, expected 64.*SGLang"),
    (OLMOE, {"rms_norm_eps": 1e-6}, "rms_norm_eps in .*found 1e-06, expected 1e-05.*SGLang"),
    *((each, {"head_dim": 128}, "head_dim in .*found 128, expected 4.*SGLang") for each in (OLMOE, MIXTRAL)),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window"),
    (MIXTRAL, {"rope_theta": 10000.5}, "rope_theta in .*found 10000.5, expected 10000.*SGLang"),
    (GLM, {"n_group": 3}, "n_group in .*found 3, expected a divisor of n_routed_experts = 16"),
    (GLM, {"n_group": 2, "topk_group": 3}, "topk_group in .*found 3, expected at most n_group = 2"),
    (GLM, {"n_group": 8, "num_experts_per_tok": 4}, "num_experts_per_tok in .*found 4, expected at most 2"),
    (GLM, {"first_k_dense_replace": 9}, "first_k_dense_replace"),
    (GLM, {"partial_rotary_factor": 0.25}, "partial_rotary_factor in .*expected one value"),
    (GLM, {"rope_parameters": PLAIN | {"partial_rotary_factor": 1e308}}, "partial_rotary_factor"),
    *((LLAMA, {key: True}, f"{key} in .*found True, expected False") for key in ("attention_bias", "mlp_bias")),
    (LLAMA, {"rope_scaling": LINEAR}, "rope_scaling.rope_type in .*'default' or 'llama3'"),
    (LLAMA, {"rope_parameters": LLAMA3 | {"beta_fast": 32}}, "rope_parameters.beta_fast in .*expected no such key"),
    (LLAMA, {"rope_parameters": LLAMA3 | {"type": "yarn"}}, "rope_parameters.rope_type in .*expected one method"),
    (LLAMA, {"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor in .*a positive number"),
    (LLAMA, {"rope_parameters": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor in .*less than high_freq_factor"),
    (MISTRAL, {"sliding_window": 4096}, "sliding_window in .*found 4096, expected null.*no windows"),
    (MISTRAL, {"sliding_window": ...}, "sliding_window in .*found 4096, expected null"),
    (GLM_5, {"index_topk": None}, "index_topk in .*found None"),
    (GLM_5, {"scoring_func": None}, "scoring_func in .*found None, expected 'sigmoid', as the engine"),
    (GLM_5, {"layer_types": ["full_attention"] * 2}, "layer_types in .*'deepseek_sparse_attention' in every layer"),
    (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    (MOE, {"mlp_only_layers": [1]}, "mlp_only_layers"),
    (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    (MOE, {"norm_topk_prob": 1}, "norm_topk_prob"),
    (NEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads in .*: found 24, expected a multiple of .* = 16"),
    (NEXT, TWO_INTERVALS, "full_attention_interval in .*: found 2, expected 4, as layer_types has it"),
    (NEXT, {"layer_types": ["full_attention"] + ["linear_attention"] * 7}, "'full_attention' in every Nth of 8 layers"),
    (NEXT, {"layer_types": ["sliding_attention"] * 8}, "'linear_attention' or 'full_attention' in every"),
    (NEXT, {"attn_output_gate": False}, "attn_output_gate in .*: found False, expected True"),
    (NEXT, {"partial_rotary_factor": 0.001}, "partial_rotary_factor in .*expected one value, .* of the 256 channels"),
    (WHOLE, {"text_config": None}, "text_config in .*: found None, expected the configuration of the text model"),
    (WHOLE, {"model_type": "qwen3_vl_moe"}, "model_type in .*: found 'qwen3_vl_moe', expected 'qwen3_5_moe'"),
    (WHOLE, {"text_config": TEXT | {"model_type": "llama"}}, "model_type in text_config of .*: found 'llama'"),
    (WHOLE, {"text_config": UNTIED, "tie_word_embeddings": True}, "text_config.tie_word_.*expected True, as beside"),
    (WHOLE, {"text_config": TEXT | {"linear_num_value_heads": 24}}, "linear_num_value_heads in text_config of .*24"),
    (WHOLE, {"architectures": ["Qwen3VLForConditionalGeneration"]}, "'Qwen3VLForConditionalGeneration'"),
    (WHOLE, {"quantization_config": {"quant_method": "awq"}}, "quantization_config in text_config of .*'awq'"),
    (DEEPSEEK, {"q_lora_rank": 1000}, "q_lora_rank in .*: found 1000, expected a multiple of 128.*SGLang"),
    (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_rope_head_dim in .*: found 63, expected an even number"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method in .*: found 'greedy', expected 'noaux_tc'"),
    (DEEPSEEK, {"index_topk": 2048}, "index_topk in .*: found 2048"),
    (DEEPSEEK, {"rope_scaling": OF_DEEPSEEK | {"mscale_all_dim": 0.5}}, "mscale in .*expected mscale_all_dim = 0.5"),
    (DEEPSEEK, {"rope_scaling": OF_DEEPSEEK | {"factor": None}}, "rope_scaling.factor in .*expected a positive number"),
    (DEEPSEEK, {"rope_parameters": PLAIN, "rope_scaling": OF_DEEPSEEK}, "rope_scaling in .*one scaling in all places"),
    (DEEPSEEK, {"model_type": "kimi_k2"}, "found 'kimi_k2', expected 'deepseek_v3': .* Write 'deepseek_v3'"),
    (DEEPSEEK, {"first_k_dense_replace": 61}, "first_k_dense_replace in .*: found 61, expected less than num_hidden"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq in .*: found 2, expected 1"),
    (DEEPSEEK, {"kv_lora_rank": ...}, "found 'no kv_lora_rank', expected its value"),
]
"""Variants of each architecture that the shared ops or SGLang's own model do not define, and what the refusal says."""


@pytest.mark.parametrize(("config", "changes", "named"), REFUSED)
def test_what_the_shared_ops_do_not_define_is_refused(
    config: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    given = {key: value for key, value in (config | changes).items() if value is not ...}
    with pytest.raises(UserError, match=named) as error:
        read_sizes(write(tmp_path, given))
    text = str(error.value)
    assert text.startswith("model.path") and "found " in text and "expected " in text and text.endswith(".")


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    neutral = {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "sliding_window": 4096}
    neutral |= {"rope_scaling": None, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0, "factor": None}}
    plain = read_sizes(write(tmp_path, MOE))
    for changes in (neutral | {"mlp_only_layers": [], "quantization_config": None}, {"quantization_config": FP8}):
        assert read_sizes(write(tmp_path, MOE | changes)) == plain


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
