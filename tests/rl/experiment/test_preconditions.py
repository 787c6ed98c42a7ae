"""Bad models, data, layouts and machines are refused before anything starts."""

import json
import shutil
import socket
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from examples.tiny_model import TinyModel, write_tiny_model
from numerics.errors import UserError
from rl.cli import app
from rl.experiment import parse_experiment
from rl.experiment.preconditions import check, data, read_model, resources, tokenizer
from rl.experiment.preconditions.model import check_model_layout
from rl.experiment.preconditions.resources import ENGINE_BYTES, RANK_BYTES, kv_cache_bytes
from rollout.tasks import prompt_ids


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two small model directories, `moe` and `dense`, that tests must not change."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "moe", TinyModel(heads=4, kv_heads=2))
    write_tiny_model(folder / "dense", TinyModel(heads=4, kv_heads=2, experts=0, intermediate=384))
    return folder


@pytest.fixture
def model(models, tmp_path):
    """A private copy of the MoE model."""
    return shutil.copytree(models / "moe", tmp_path / "model")


@pytest.fixture
def values(model, tmp_path):
    """A spec that passes, as plain values."""
    write_lines(tmp_path / "train.jsonl", [("9+4=?", "#### 13")] * 3)
    write_lines(tmp_path / "eval.jsonl", [("1+4=?", "#### 5")] * 2)
    return {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
        "eval": {"problems": 2},
    }


def write_lines(path, problems):
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in problems))


def merged(values: dict, **sections: dict) -> dict:
    return {**values, **{name: {**values.get(name, {}), **keys} for name, keys in sections.items()}}


def refusal(values: dict, **sections: dict) -> str:
    with pytest.raises(UserError) as error:
        check(parse_experiment(merged(values, **sections)))
    return str(error.value)


def edit_config(model, **changes) -> None:
    path = model / "config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(config))


def test_a_good_spec_passes_and_its_model_is_read(values):
    sizes = check(parse_experiment(values)).sizes
    assert (sizes.layers, sizes.hidden_size, sizes.heads, sizes.kv_heads, sizes.head_dim) == (2, 128, 4, 2, 128)
    assert (sizes.experts, sizes.top_k, sizes.expert_size) == (8, 2, 128)


def test_a_dense_model_passes(values, models):
    sizes = check(parse_experiment(merged(values, model={"path": str(models / "dense")}))).sizes
    assert not sizes.moe and sizes.ffn_size == 384


def test_either_spelling_of_the_expert_count_is_read(values, model):
    edit_config(model, num_experts=None)
    assert check(parse_experiment(values)).sizes.experts == 8
    edit_config(model, num_experts=4, num_local_experts=None)
    assert read_model(model).sizes.experts == 4


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("config.json", "without config.json"),
        ("model.safetensors", "safetensors weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_model_directory_with_a_missing_file_is_refused(values, model, file, expected):
    (model / file).unlink()
    assert expected in refusal(values)


def test_a_missing_model_directory_is_refused(values, tmp_path):
    text = refusal(values, model={"path": str(tmp_path / "absent")})
    assert text.startswith("model.path: found") and "absent" in text and "relative to the spec file" in text


def test_broken_model_files_are_refused(values, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "whole safetensors file" in refusal(values)
    (model / "config.json").write_text("{")
    assert "valid JSON" in refusal(values)


def test_a_missing_shard_is_refused(values, model):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    assert "model-00001.safetensors" in refusal(values)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None])
def test_an_unsupported_architecture_is_refused(values, model, architectures):
    edit_config(model, architectures=architectures)
    text = refusal(values)
    assert "architectures" in text and "Qwen3MoeForCausalLM" in text


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("num_hidden_layers", "2"), ("vocab_size", 0)])
def test_a_config_without_a_dimension_is_refused(values, model, key, value):
    edit_config(model, **{key: value})
    assert key in refusal(values)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 192), ("head_dim", 64), ("moe_intermediate_size", 96)])
def test_dimensions_that_straddle_blocks_are_refused_in_fp8_only(values, model, key, value):
    edit_config(model, **{key: value})
    text = refusal(values)
    assert key in text and str(value) in text and "multiple of 128" in text
    for one_side in ({"trainer": "bf16"}, {"rollout": "bf16"}):
        assert key in refusal(values, numerics=one_side)
    bf16 = parse_experiment(merged(values, numerics={"preset": "bf16", "trainer": "bf16", "rollout": "bf16"}))
    check_model_layout(read_model(model).sizes, bf16)


@pytest.mark.parametrize("choice", ["record", "replay"])
def test_routing_replay_of_a_dense_model_is_refused(values, models, choice):
    numerics = {"router_replay": choice}
    check(parse_experiment(merged(values, numerics=numerics)))
    text = refusal(values, model={"path": str(models / "dense")}, numerics=numerics)
    assert text.startswith("numerics.router_replay") and choice in text and "expected off" in text


def test_tensor_parallel_slices_must_hold_whole_blocks(values, models):
    dense = {"path": str(models / "dense")}
    text = refusal(values, model=dense, trainer={"tp": 2})
    assert "intermediate_size" in text and "192" in text
    check(parse_experiment(merged(values, trainer={"tp": 2})))  # experts are not split, 4 heads of 128 are


@pytest.mark.parametrize(
    ("trainer", "key", "reason"),
    [
        ({"pp": 2}, "trainer.pp", "not in this release"),
        ({"tp": 3}, "trainer.tp", "num_attention_heads = 4"),
        ({"tp": 4}, "trainer.tp", "num_key_value_heads = 2"),
        ({"ep": 3, "dp": 3}, "trainer.ep", "num_experts = 8"),
        ({"ep": 2}, "trainer.ep", "tp * dp = 1 * 1"),
        ({"ep": 4, "tp": 2}, "trainer.ep", "tp * dp = 2 * 1"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused(values, trainer, key, reason):
    text = refusal(values, trainer=trainer)
    assert text.startswith(key) and reason in text


def test_some_layer_must_be_left_to_quantize(values):
    """The model has two."""
    check(parse_experiment(merged(values, numerics={"last_layers_bf16": 1})))
    text = refusal(values, numerics={"first_layers_bf16": 1, "last_layers_bf16": 1})
    assert text.startswith("numerics.first_layers_bf16 + numerics.last_layers_bf16: found 2, expected less than")
    off = {"preset": "bf16", "trainer": "bf16", "rollout": "bf16"}
    check(parse_experiment(merged(values, numerics={"first_layers_bf16": 2, **off})))


@pytest.mark.parametrize("trainer", [{"ep": 2, "dp": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "dp": 2}, {"dp": 3}])
def test_layouts_that_divide_the_model_pass(values, trainer):
    check(parse_experiment(merged(values, trainer=trainer)))


def test_a_spec_that_transformer_engine_does_not_compute_is_refused_where_it_would(values, monkeypatch):
    native = {"mode": "native", "activation": {"granularity": "tensor"}}
    check(parse_experiment(merged(values, numerics=native)))
    monkeypatch.setattr("rl.experiment.preconditions.has_transformer_engine", lambda: True)
    assert refusal(values, numerics=native).startswith("numerics.activation.granularity: found 'tensor'")
    check(parse_experiment(merged(values, numerics={"mode": "native"})))


def test_experts_of_a_dense_model_are_refused(values, models):
    assert "dense" in refusal(values, model={"path": str(models / "dense")}, trainer={"ep": 2, "dp": 2})


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
def test_truncated_sampling_is_refused_in_exact_mode(values, key, value):
    text = refusal(values, rollout={key: value})
    assert text.startswith(f"rollout.{key}: found {value}") and "exact mode" in text
    check(parse_experiment(merged(values, rollout={key: value}, numerics={"mode": "native"})))


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "existing JSONL file"),
        ("", "at least one problem"),
        ('{"question": "q", "answer": "#### 1"}\n{"question"\n', "line 2"),
        ('{"question": "q", "answer": "#### 1"}\n{"question": "q", "answer": "one"}\n', "line 2"),
    ],
)
def test_bad_data_files_are_refused(values, tmp_path, key, content, expected):
    path = tmp_path / f"{key}.jsonl"
    path.unlink() if content is None else path.write_text(content)
    text = refusal(values)
    assert text.startswith(f"data.{key}") and expected in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 0.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before(values, model, key, value):
    edit_config(model, **{key: value})
    text = refusal(values)
    assert text.startswith(f"model.path: {key}") and "found " in text


def test_quantized_weights_are_refused_even_if_the_config_hides_them(values, model):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    text = refusal(values)
    assert name in text and "F8_E4M3" in text and "BF16 checkpoint" in text
    save_file({name: tensor.float() for name, tensor in weights.items()}, model / "model.safetensors")
    check(parse_experiment(values))


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 1}', "{"])
def test_a_broken_weight_index_is_refused(values, model, index):
    (model / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(values)


@pytest.mark.parametrize(("key", "named"), [("eos_token", "without eos_token"), ("chat_template", "chat template")])
def test_a_tokenizer_that_cannot_render_or_end_is_refused(values, model, key, named):
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    text = refusal(values)
    assert text.startswith("model.path: tokenizer") and named in text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for message in messages", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no.such }}", "UndefinedError"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than"),
        ("a fixed prompt", "renders two questions alike"),
        ("{{ nothing_of_this_name }}", "renders two questions alike"),
    ],
)
def test_a_chat_template_that_renders_no_question_is_refused(values, model, monkeypatch, template, said):
    monkeypatch.setattr(tokenizer, "RENDER_SECONDS", 0.5)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    text = refusal(values)
    assert text.startswith("model.path: tokenizer") and said in text
    out = model.parent / "converted"
    result = CliRunner().invoke(app, ["convert", str(model), str(out)])
    assert result.exit_code == 2 and "MODEL: tokenizer" in result.stderr and said in result.stderr
    assert not out.exists()


def test_a_line_of_megabytes_is_refused_untokenized(values, tmp_path, monkeypatch):
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1+1=?" * 2_000_000, "#### 2")])
    tokenized = []
    monkeypatch.setattr(data, "prompt_ids", lambda tokenizer, text: tokenized.append(len(text)) or [1])
    text = refusal(values)
    assert text.startswith("data.train: line 2") and "10000000 bytes" in text
    assert max(tokenized) < 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(values, model, value):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name][3, 5] = value
    save_file(weights, model / "model.safetensors")
    text = refusal(values)
    assert text.startswith(f"model.path: {name}: found '1 of ") and "NaN or infinite" in text


def test_a_broken_tokenizer_and_one_of_another_model_are_refused(values, model):
    edit_config(model, vocab_size=100)
    text = refusal(values)
    assert "tokenizer of 128 tokens" in text and "vocab_size = 100" in text
    (model / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refusal(values)


def test_a_reference_that_math_verify_cannot_read_is_named_by_its_line(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("q", "#### 3"), ("q", r"#### \frac{1}{2}"), ("q", "so #### $$ ")])
    text = refusal(values, data={"reward": "math"})
    assert text.startswith("data.train: line 3: answer") and "math-verify" in text


def test_answers_need_not_be_integers_for_the_math_reward_or_for_sft(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("half of one?", r"$\frac{1}{2}$")])
    check(parse_experiment(merged(values, data={"reward": "math"})))
    check(parse_experiment(merged(values, algorithm={"name": "sft"})))


def test_evaluation_needs_enough_held_out_problems(values):
    assert "at most the 2 problems" in refusal(values, eval={"problems": 3})
    assert refusal(values, data={"eval": None}).startswith("data.eval")
    check(parse_experiment(merged(values, data={"eval": None}, eval={"problems": 0})))


def test_a_prompt_that_leaves_no_room_is_named_by_its_line(values, tmp_path):
    # <|user|> + 30 characters + <|assistant|> = 32 tokens, and 20 new ones.
    write_lines(tmp_path / "train.jsonl", [("1+1=?", "#### 2"), ("1" * 30, "#### 2")])
    check(parse_experiment(merged(values, rollout={"context_length": 52})))
    text = refusal(values, rollout={"context_length": 51})
    assert text.startswith("data.train: line 2") and "32 tokens" in text and "at most 31" in text


def test_a_supervised_pair_must_fit_with_its_end_of_sequence(values, tmp_path):
    write_lines(tmp_path / "train.jsonl", [("1" * 30, "2" * 40)])
    sft = {"algorithm": {"name": "sft"}, "eval": {"problems": 0}}
    check(parse_experiment(merged(values, **sft, rollout={"context_length": 73})))
    assert "72 tokens" in refusal(values, **sft, rollout={"context_length": 72})


def test_the_context_must_fit_the_model_and_the_cache(values):
    assert "max_position_embeddings" in refusal(values, rollout={"context_length": 4096})
    assert refusal(values, rollout={"max_new_tokens": 1024}).startswith("rollout.max_new_tokens")
    assert refusal(values, rollout={"max_total_tokens": 1023}).startswith("rollout.max_total_tokens")


def test_a_kv_cache_beyond_the_free_memory_is_refused(values, monkeypatch):
    memory = namedtuple("memory", "available")
    spec = parse_experiment(merged(values, rollout={"max_total_tokens": 2048, "engines": 2}))
    # 2 engines x 2048 tokens x 2 layers x 2 kv heads x 128 x (key and value) x 2 bytes
    cache = 2 * 2048 * 2 * 2 * 128 * 2 * 2
    needed = cache + RANK_BYTES + 2 * ENGINE_BYTES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: memory(needed))
    assert kv_cache_bytes(check(spec).sizes, spec.rollout) == cache
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: memory(needed - 1))
    with pytest.raises(UserError, match="rollout.max_total_tokens: found 2048") as error:
        check(spec)
    assert "2047" in str(error.value), "the message says how many tokens would fit"
    check(parse_experiment(merged(values, algorithm={"name": "sft"}, eval={"problems": 0})))  # starts no engine


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"dp": 4000}}, "trainer.dp: found 4000"),
        ({"rollout": {"engines": 4000}}, "rollout.engines: found 4000"),
    ],
)
def test_more_processes_than_the_memory_holds_are_refused(values, monkeypatch, sections, said):
    monkeypatch.setattr(resources, "available_memory", lambda: 900 << 30)
    assert refusal(values, **sections).startswith(said)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check(parse_experiment(merged(values, **sections)))


def test_the_limit_of_a_control_group_counts(values, tmp_path, monkeypatch):
    """The innermost of the limited groups decides; file pages not read lately are as good as free."""
    outer, inner = tmp_path / "group", tmp_path / "group" / "job"
    inner.mkdir(parents=True)
    for group, limit, used, files in ((outer, 1 << 30, 1 << 20, 0), (inner, 5000, 4500, 300)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 7\ninactive_file {files}\n")
    own = tmp_path / "own"
    monkeypatch.setattr(resources, "CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "OWN_CGROUP", own)
    own.write_text("4:memory:/x\n0::/group/job\n")
    assert resources.available_memory() == 800
    assert "rollout.engines" in refusal(values)
    (inner / "memory.max").write_text("max\n")
    assert resources.available_memory() <= (1 << 30) - (1 << 20)
    own.write_text("0::/\n")
    assert resources.available_memory() > 0
    check(parse_experiment(values))


def test_a_taken_port_and_a_shared_port_are_refused(values):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = refusal(values, rollout={"port": port})
        assert text.startswith(f"rollout.port: found {port}") and "another engine" in text
    check(parse_experiment(merged(values, rollout={"port": port})))
    assert "two engines" in refusal(values, rollout={"port": port, "engines": 2})


def test_the_tiny_model_renders_prompts_and_decodes_characters(models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "moe")
    ids = prompt_ids(tokenizer, "9+4=?")
    assert tokenizer.decode(ids) == "<|user|>9+4=?<|assistant|>" and len(ids) == 7
    text = "a b\n c  d #### -7~"
    encoded = tokenizer(text, add_special_tokens=False).input_ids
    assert len(encoded) == len(text) and tokenizer.decode(encoded) == text
    assert tokenizer.decode([*encoded, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 128


def test_the_tiny_model_is_bf16_per_expert_on_disk_and_fixed_by_its_seed(models, tmp_path):
    weights = load_file(models / "moe" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (128, 128)
    write_tiny_model(tmp_path / "same", TinyModel(heads=4, kv_heads=2))
    write_tiny_model(tmp_path / "other", TinyModel(heads=4, kv_heads=2), seed=1)
    same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "other"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_the_tiny_model_refuses_what_it_cannot_write(models, tmp_path):
    with pytest.raises(UserError, match="exist"):
        write_tiny_model(models / "moe")
    with pytest.raises(UserError, match="--vocab"):
        write_tiny_model(tmp_path / "x", TinyModel(vocab=100))
    assert list(tmp_path.iterdir()) == []
