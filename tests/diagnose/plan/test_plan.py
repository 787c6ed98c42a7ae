"""Plans of real models: what fits, what conflicts, what is refused; and the command."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fp8rl.diagnose.plan import Plan, fitted_plan, make_plan
from fp8rl.diagnose.plan.bench import Rate, read_bench
from fp8rl.diagnose.plan.plan_report import reported
from fp8rl.diagnose.plan.subject import read_plan_subject
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment.budget.job import GPUS, gpu_named
from fp8rl.rl.experiment.budget.memory import (
    PHASES,
    Phase,
    activation_bytes,
    colocated_memory,
    logit_bytes,
    trainer_memory,
)
from lab.studies.document.calculated import on_h20
from lab.written_tables import with_plan
from tests.support.commands import result_of, shown
from tests.support.paths import CONFIGS, EXAMPLES, REAL_SPECS, SPECS


@cache
def planned(subject: str, *overrides: str, gpu: str = "h100", gpus: int | None = None, **options) -> Plan:
    found = read_plan_subject(subject, overrides)
    return make_plan(found, gpu_named(gpu), gpus, **options)


@pytest.fixture(scope="module")
def eight_h200() -> Plan:
    keys = ("trainer.ep=8", "trainer.micro_batch_tokens=4096", "rollout.max_total_tokens=32768")
    return planned("qwen3_30b_a3b", *keys, gpu="h200", gpus=8, length=4096)


def page_of(plan: Plan) -> str:
    return shown(reported(plan))


@pytest.mark.parametrize(("model", "gpus"), [("qwen3_30b_a3b", 16), ("qwen3_235b_a22b", 128)])
def test_the_posts_moe_runs_fit_on_their_h20(model: str, gpus: int) -> None:
    job = on_h20(model)
    assert job.layout.world_size == gpus and colocated_memory(job).peak <= GPUS["h20"].memory
    awake = colocated_memory(replace(job, sleep=False)).peak
    assert (awake > GPUS["h20"].memory) == (gpus == 128), "the large one does not fit awake"


def test_eight_h200_hold_what_the_review_of_the_gpu_path_found(eight_h200: Plan) -> None:
    """80.0 GiB of state, 29.0 of engine weights; 4,096 tokens a micro-batch need about 29 GiB with logits, about 24 are
    left, and about 3,000 tokens fit (with 32,768 tokens of cache)."""
    memory = trainer_memory(eight_h200.job)
    assert (memory.always - memory.held["runtime"]["train"]) / 2**30 == pytest.approx(80.0, abs=0.1)
    assert eight_h200.memory["engine"].held["engine weights"]["rollout"] / 2**30 == pytest.approx(29.0, abs=0.1)
    needed = activation_bytes(eight_h200.job) + logit_bytes(eight_h200.job)
    assert needed / 2**30 == pytest.approx(29, rel=0.06) and not eight_h200.ok
    assert eight_h200.largest_micro_batch["colocated"] == pytest.approx(3000, rel=0.1)


def test_a_phase_holds_what_it_needs(eight_h200: Plan) -> None:
    both = eight_h200.memory["colocated"]
    assert both.in_phase("train") - both.in_phase("update") == pytest.approx(
        activation_bytes(eight_h200.job) + logit_bytes(eight_h200.job)
    )
    assert both.in_phase("sync") - both.in_phase("update") == 2 * (256 << 20)
    job = eight_h200.job
    assert both.in_phase("rollout") - both.in_phase("update") == job.working_bytes - job.buffer_bytes > 0
    assert both.peak == both.in_phase("train")
    alone, engine = eight_h200.memory["trainer"], eight_h200.memory["engine"]
    assert both.always == alone.always + engine.always
    assert engine.in_phase("sync") - engine.in_phase("update") == 256 << 20, "the one that a broadcast fills"


def test_asleep_each_side_makes_room_for_the_other() -> None:
    """What stays are the trainer's weights, and not those of a reference."""
    job = replace(on_h20("qwen3_235b_a22b"), reference=True)
    asleep, awake = colocated_memory(job), colocated_memory(replace(job, sleep=False))

    def held(phase: Phase) -> set[str]:
        return {name for name, bytes_of in asleep.held.items() if bytes_of.get(phase)}

    engine = {"engine weights", "KV cache"}
    state = {name.partition(" ")[2] for name in held("rollout") if name.startswith(("dense", "experts"))}
    assert state == {"parameters"} and "reference" not in held("rollout") | held("sync")
    assert "reference" in held("train") and engine <= held("rollout") and not engine & (held("train") | held("update"))
    assert "engine weights" in held("sync") and not {"KV cache", "experts moments", "experts gradients"} & held("sync")
    for phase in PHASES:
        gone = sum(awake.held[name].get(phase, 0.0) for name in awake.held.keys() - held(phase))
        assert asleep.in_phase(phase) == pytest.approx(awake.in_phase(phase) - gone)
    assert asleep.peak == max(asleep.in_phase("rollout"), asleep.in_phase("train")) < awake.peak


def test_recomputing_keeps_two_hidden_rows_a_layer(eight_h200: Plan) -> None:
    job = eight_h200.job
    held = job.shape.activations(0).bf16

    def kept(recompute: str) -> float:
        layout = job.layout.model_copy(update={"recompute": recompute})
        return activation_bytes(replace(job, layout=layout)) / job.micro_batch

    assert kept("layer") == pytest.approx(48 * 2 * 2048 + held)
    assert kept("layer") < kept("experts") < kept("attention") < kept("none") == pytest.approx(48 * held)
    inside = job.shape.activations(0, "mlp").bf16
    assert kept("experts") == pytest.approx(48 * (held - inside + 2 * 2048) + inside)


def test_logits_are_those_of_a_chunk_and_its_weight_s_gradient_is_beside_them(eight_h200: Plan) -> None:
    job, vocab = eight_h200.job, 151936
    assert logit_bytes(job, 4096) == 6 * vocab * 4096
    assert logit_bytes(job, 32768) == logit_bytes(job, 4097) == 6 * vocab * 4096 + 4 * vocab * 2048
    layout = job.layout.model_copy(update={"head_chunk_tokens": 512})
    assert logit_bytes(replace(job, layout=layout), 4096) == 6 * vocab * 512 + 4 * vocab * 2048


@pytest.mark.slow
def test_the_largest_micro_batch_counts_a_chunk_of_logits() -> None:
    keys = ("trainer.recompute=layer", "trainer.ep=8", "trainer.dp=8")
    plans = {each: planned("qwen3_30b_a3b", *keys, f"trainer.head_chunk_tokens={each}", gpu="h200", gpus=8)
             for each in (1024, 1 << 20)}  # fmt: skip
    for plan in plans.values():
        for name in ("colocated", "trainer"):
            job = replace(plan.job, length=plan.largest_micro_batch[name])
            layout = job.layout.model_copy(update={"micro_batch_tokens": job.length})
            memory = {"colocated": colocated_memory, "trainer": trainer_memory}[name](replace(job, layout=layout))
            assert plan.gpu.memory * 0.99 < memory.in_phase("train") <= plan.gpu.memory
    assert plans[1024].largest_micro_batch["trainer"] > 2 * plans[1 << 20].largest_micro_batch["trainer"]


def test_rows_end_to_end_fill_a_micro_batch(eight_h200: Plan) -> None:
    job = replace(eight_h200.job, length=3000)

    def tokens(budget: int, packing: bool) -> int:
        keys = {"micro_batch_tokens": budget, "packing": packing}
        return replace(job, layout=job.layout.model_copy(update=keys)).micro_batch

    assert [tokens(8192, packing) for packing in (False, True)] == [6000, 8192]
    assert [tokens(2048, packing) for packing in (False, True)] == [3000, 3000]
    share = 3000 * job.rows // job.layout.dp
    assert [tokens(10 * share, packing) for packing in (False, True)] == [share, share]


@pytest.mark.slow
def test_a_group_s_prompt_is_computed_once() -> None:
    """Two groups of eight rows of 96 tokens and answers of 32, by their lists of keys."""
    rollout = {"prompts_per_step": 2, "group_size": 8, "context_length": 96, "max_new_tokens": 32}
    keys = tuple(f"rollout.{name}={value}" for name, value in rollout.items())
    job = planned("qwen3_8b", *keys, "trainer.prefix_sharing=true", gpus=1).job
    seen = [at + 1 for at in range(64)] + 8 * [at + 1 for at in range(64, 96)]
    assert job.laid_tokens == 2 * len(seen) == 640 and job.tokens == 16 * 96
    flat = planned("qwen3_8b", *keys, gpus=1)
    assert flat.job.laid_tokens == flat.job.tokens


@pytest.mark.slow
def test_the_first_stage_keeps_most_micro_batches() -> None:
    plan = planned("qwen3_30b_a3b", "trainer.pp=4", "trainer.ep=2", gpu="h200", gpus=8)
    first, last = (activation_bytes(plan.job, stage) for stage in (0, 3))
    assert first == 4 * last and "logits" in plan.stages[3].held and "logits" not in plan.stages[0].held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "keys", "without", "conflict"),
    [
        ("qwen3_8b", ("numerics.mode=native", "trainer.optimizer.offload=true"), ("numerics.trainer=bf16",), "#2407"),
        ("qwen3_4b", ("trainer.tp=8",), ("numerics.trainer=bf16", "numerics.rollout=bf16"), "trainer.tp = 9728 / 8"),
    ],
)
def test_keys_that_conflict_with_fp8_are_named(subject, keys, without, conflict) -> None:
    (found,) = [each for each in planned(subject, *keys, gpus=8).findings if each.grade == "error"]
    assert conflict in found.key + found.expected and planned(subject, *keys, *without, gpus=8).ok


@pytest.mark.parametrize(
    ("subject", "overrides", "options", "message"),
    [("qwen9", (), {}, "SPEC|MODEL: found 'qwen9', expected an existing YAML spec, a Hugging Face directory, or one"),
     ("qwen3_4b", (), {"gpu": "v100"}, "--gpu: found 'v100', expected one of h100, h200, h800, h20, b200, b300"),
     ("qwen3_4b", ("trainer.tp=4",), {"gpus": 6}, "--gpus: found 6, expected a multiple of trainer.tp * trainer.pp"),
     ("qwen3_30b_a3b", ("trainer.ep=16",), {"gpus": 8}, "trainer.ep: found 16, expected a divisor of tp * dp"),
     ("qwen3_30b_a3b", ("trainer.pp=5",), {"gpus": 5}, "trainer.pp: found 5, expected a divisor of the model's"),
     ("qwen3_4b", ("trainer.ttp=4",), {}, "trainer.ttp")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(subject, overrides, options, message) -> None:
    with pytest.raises(UserError) as error:
        planned(subject, *overrides, **options)
    assert message in str(error.value)


def test_times_are_those_of_measured_rates_alone(tmp_path: Path) -> None:
    gemm = {"product": "qkv", "tokens": 4096, "BF16 cuBLAS": 600.0, "FP8": 700.0, "FP8 torch._scaled_mm": 1000.0}
    larger = {"product": "o", "tokens": 16384, "BF16 cuBLAS": 700.0, "FP8": 800.0, "FP8 torch._scaled_mm": 1200.0}
    rows = {
        "gemms": [{"product": "qkv", "tokens": 16, "BF16 cuBLAS": 1.0, "FP8": 1.0}, gemm, larger],
        "grouped": [{"product": "gate_up", "tokens": 4096, "FP8": 500.0, "FP8 wgrad": 400.0}],
        "quantizers": [{"kernel": "rows 1x128", "GB/s": 1500.0, "of copy": 0.5}],
        "graph": [{"rows": 64, "kernels": 60, "GB": 3.0, "graph (s)": 1.6e-3}, {"rows": 1, "graph (s)": 1e-3}],
        "launch": [*({"what": "launch", "us of the host": us} for us in (50.0, 40.0)), {"what": "node", "us": 2.0}],
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"machine": {"device": "NVIDIA H200"}, "rows": rows}))
    exact, native = read_bench(path).values()

    def ends(rate: Rate | None) -> tuple[float, float] | None:
        return rate and (rate.low, rate.high)

    assert ends(exact.dense) == ends(native.dense) == (600e12, 700e12)
    assert ends(exact.fp8_dense) == (700e12, 800e12) and ends(native.fp8_dense) == (1000e12, 1200e12)
    assert ends(exact.fp8_experts) == (500e12, 500e12) and ends(exact.product(True, True, True)) == (400e12, 400e12)
    assert exact.experts is None and native.fp8_experts is None
    assert ends(exact.copy) == (3e12, 3e12) and ends(exact.launches) == (20_000, 25_000)
    assert ends(exact.nodes) == (500_000, 500_000) and native.launches is native.nodes is None
    assert ends(exact.decode[64]) == pytest.approx((1e5, 1e5)) and exact.decode[1] is exact.decode[256] is None
    plan = planned("qwen3_8b", gpu="h200", gpus=8, bench=path)
    page = page_of(plan)
    assert "a step, at least" in page and "measured on NVIDIA H200" in page
    assert "decoding 64 answers (410 kernels) / stock SGLang (554 kernels), at most: " in page
    assert "decoding 1 answer (410 kernels) / stock SGLang (554 kernels), at most: not measured" in page
    assert "graph: 64 answers, 1 row" in page and "training step / TransformerEngine: " in page and "assumed: " in page
    assert "gemms: FP8, 2 rows; gemms: BF16 cuBLAS, 2 rows" in page and "not in these times: attention" in page
    facts = json.loads(reported(plan).to_json())["facts"]
    assert facts["steps"][0]["at_least"] == [*plan.steps[0].total] and facts["ratios"][1]["ratio"][0] > 1
    without = planned("qwen3_8b", gpu="h200", gpus=8)
    assert "SGLang" not in page_of(without) and "a step, at least" not in page_of(without) and not without.steps
    for text in ("", '{"rows": {}}', '{"machine": {"device": "x"}, "rows": {"launch": [{"what": "node", "us": 0}]}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="--bench: .*found .*python -m lab.bench.gpu"):
            read_bench(path)


@pytest.mark.slow
def test_the_command_prints_json_and_says_by_its_exit_code_whether_it_holds() -> None:
    done = result_of("plan", "qwen3_8b", "--gpus", "8", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and (report["command"], report["schema"]) == ("plan", 3)
    values = report["facts"]
    assert (values["parameters"], values["job"]["layout"]["cp"], len(values["fewest"])) == (8_190_735_360, 1, 4)
    assert values["memory"]["colocated"]["held"]["dense masters"]["train"] > 0
    assert values["rates"] is None and values["steps"] == []
    assert result_of("plan", "qwen3_235b_a22b", "--gpus", "8").exit_code == 1
    without_fp8 = result_of("plan", "smollm2_135m", "--gpu", "a100")
    assert without_fp8.exit_code == 1 and "numerics.mode: found 'exact on GPUs" in without_fp8.stdout
    assert result_of("plan", "qwen3_8b", "--fit", "--gpus", "0").exit_code == 2
    nothing = result_of("plan")
    assert nothing.exit_code == 2 and "SPEC|MODEL: found ''" in nothing.stderr


def test_a_spec_is_planned_as_it_stands() -> None:
    plan = planned(str(EXAMPLES / "arithmetic.yaml"), "trainer.dp=2", length=32)
    assert (plan.gpus, plan.job.shape.parameters, plan.job.rows, plan.job.length) == (2, 1_019_008, 256, 32)
    assert plan.sync_bytes == (1_055_216, 2_038_016)
    apart = planned("qwen3_8b", "sync.transport=distributed", gpu="h200", gpus=8)  # its BF16 is without engines, too
    assert [each.grade for each in apart.findings if each.key == "numerics.trainer"] == ["note"]


GPU_RECIPES = {"gsm8k": "h200", **REAL_SPECS}
"""Recipes for GPUs, and the kind that they are written for; the others are for a CPU."""
NEEDS = {name: [f"model.path={EXAMPLES / 'models/tiny_qwen3_moe'}"] for name in ("calculator", "tool_calls")}
"""Examples that start from what another one has trained."""


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_example_is_planned_and_leaves_the_slack_that_a_real_run_needs(path: Path) -> None:
    gpu, overrides = GPU_RECIPES.get(path.stem, "h100"), NEEDS.get(path.stem, [])
    plan = planned(str(path), *overrides, gpu=gpu)
    assert plan.ok and plan.slack >= plan.needed_slack
    assert page_of(plan).splitlines()[-1].startswith(f"the plan fits on {plan.gpus} x ")


@pytest.mark.slow
@pytest.mark.parametrize("example", REAL_SPECS)
def test_a_spec_for_a_real_model_shows_the_plan_as_it_is_now(example: str) -> None:
    """`python -m lab.written_tables SPEC...` writes it."""
    path = EXAMPLES / f"planned/{example}.yaml"
    assert f"--gpu {REAL_SPECS[example]}`" in path.read_text() and path.read_text() == with_plan(path, planned)


def test_a_supervised_step_has_the_rows_of_its_batch_and_no_engine() -> None:
    plan = planned(str(EXAMPLES / "arithmetic_sft.yaml"), "algorithm.batch_size=48")
    assert plan.job.rows == 48 and plan.decides == "trainer" and not plan.decode and "engine" not in page_of(plan)
    assert "critic" in planned(str(EXAMPLES / "arithmetic_ppo.yaml")).memory["trainer"].held


def test_a_spec_whose_model_is_not_there_yet_is_planned_with_the_config_of_its_name(tmp_path: Path) -> None:
    spec = str(EXAMPLES / "planned/gsm8k.yaml")
    for path in (tmp_path / "Qwen3-30B-A3B", "qwen3_30b_a3b"):
        plan = planned(spec, f"model.path={path}", gpu="h200")
        assert plan.job.shape.parameters == 30_532_122_624
        (note,) = [each for each in plan.findings if each.key == "model.path"]
        assert note.grade == "note" and "packaged config of qwen3_30b_a3b" in note.remedy
    with pytest.raises(UserError, match=r"model.path: found .*qwen3_30b'.*Did you mean qwen3_30b_a3b\? Correct"):
        planned(spec, f"model.path={tmp_path / 'qwen3_30b'}")
    assert planned(str(EXAMPLES / "arithmetic.yaml")).job.shape.parameters == 1_019_008


@pytest.mark.slow
def test_a_plan_that_leaves_little_free_says_so() -> None:
    """6,144 tokens in a micro-batch: 136.3 of 149.3 GB by calculation."""
    plan = planned(str(EXAMPLES / "planned/gsm8k.yaml"), "trainer.micro_batch_tokens=6144", gpu="h200")
    assert plan.ok and 0 < plan.slack < plan.needed_slack
    (note,) = [each for each in plan.findings if each.key == "memory"]
    assert note.grade == "note" and "136.3 GB" in note.found
    assert f"Lower trainer.micro_batch_tokens to {plan.largest_with_slack}" in note.remedy
    page = page_of(plan)
    assert "a GPU needs 136.3 GB and has 149.3 (trainer 136.3, engine " in page
    assert "12.9 GB free (8.7%); a real run needs 14.9 GB free (10%)" in page
    assert "leaves less free than a real run needs" in page.splitlines()[-1]
    fits = planned(
        str(EXAMPLES / "planned/gsm8k.yaml"), f"trainer.micro_batch_tokens={plan.largest_with_slack}", gpu="h200"
    )
    assert fits.slack >= fits.needed_slack


@pytest.mark.slow
def test_a_plan_says_how_many_gpus_would_do() -> None:
    small = planned("qwen3_30b_a3b", "trainer.ep=4", gpu="h200", gpus=4)
    assert not small.ok and small.fewest is not None and small.fewest.world_size == 8
    assert "with these settings 8 GPUs suffice for the trainer beside an engine" in page_of(small)
    layout = small.fewest
    keys = [f"trainer.{name}={getattr(layout, name)}" for name in ("tp", "pp", "ep", "dp")]
    enough = planned("qwen3_30b_a3b", *keys, gpu="h200")
    assert enough.ok and enough.slack >= enough.needed_slack
    light = ("trainer.recompute=layer", "trainer.optimizer.offload=true")
    apart = planned("deepseek_v3", *light, gpu="h200", gpus=8)  # engines of one rank, which takes 680 GB
    assert apart.fewest_apart and apart.fewest is not None and "with engines on their own GPUs" in page_of(apart)
    assert "raise rollout.tp" in apart.findings[0].remedy.lower() and " GB short; " in page_of(apart)
    never = planned("qwen3_8b", "trainer.micro_batch_tokens=4000000", gpus=8, length=4_000_000)
    assert never.fewest is None and "no number of H100 SXM suffices for the trainer" in page_of(never)
    tight = replace(small, largest_with_slack=0, largest_micro_batch={"colocated": 2422, "trainer": 2422})
    assert "no micro-batch leaves 10% free; at most 2,422 tokens fit" in page_of(tight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "keys"),
    [("qwen3_8b", "h100", 8, ""), ("qwen3_30b_a3b", "h100", 8, "rollout.sleep=true trainer.optimizer.offload=true"),
     ("qwen3_30b_a3b", "h20", 8, "rollout.sleep=true trainer.recompute=experts"),
     ("deepseek_v3", "h200", None, "numerics.mode=native rollout.tp=8 sync.transport=distributed")],
)  # fmt: skip
def test_keys_with_which_a_model_fits_are_found_and_hold(model: str, gpu: str, gpus: int | None, keys: str) -> None:
    plan = fitted_plan(model, [], gpu_named(gpu), gpus)
    assert plan.ok and plan.slack >= plan.needed_slack and plan.keys is not None and {*keys.split()} <= {*plan.keys}
    assert not {each for each in plan.keys if not each.startswith("trainer.")} - {*keys.split()}
    *rest, last = page_of(plan).splitlines()
    assert last.startswith("the plan fits on")
    (at,) = (number for number, line in enumerate(rest) if "with these keys" in line)
    assert rest[at + 1].split() == [*plan.keys]


@pytest.mark.slow
def test_no_keys_are_named_where_a_spec_fits_and_none_where_nothing_does() -> None:
    spec = str(EXAMPLES / "planned/qwen3_30b_a3b.yaml")
    plan = fitted_plan(spec, [], gpu_named("h200"))
    assert plan.keys == () and "no key has to be set" in page_of(plan)
    assert fitted_plan(spec, ["rollout.tp=4"], gpu_named("h200")).keys == ("rollout.tp=1",)
    light = str(EXAMPLES / "planned/qwen3_4b_one_gpu.yaml")
    kept = fitted_plan(light, ["trainer.optimizer.offload=false"], gpu_named("h100"))
    assert kept.keys == ("trainer.optimizer.offload=true",)
    adapters = str(EXAMPLES / "planned/qwen3_4b_lora_one_gpu.yaml")  # native mode has none, and no keys in FP8
    for subject, keys, gpus in ((adapters, [], 1), (light, ["numerics.kv=fp8"], 1), ("deepseek_v3", [], 8)):
        never = fitted_plan(subject, keys, gpu_named("4090"), gpus)
        assert never.keys is None and not never.ok and never.searched
    assert "--fit found no keys with which it fits on 8 GPUs" in page_of(never)
    small = planned("qwen3_30b_a3b", gpu="h100", gpus=8)
    assert "64 GPUs suffice" in page_of(small) and "; 8 with rollout.sleep=true" in page_of(small)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "found"),
    [  # in the first, native mode would fit with engines on 16 more
        (["algorithm.kl.loss.coefficient=0.001", "trainer.optimizer.offload=false"], "trainer.optimizer.offload=true"),
        (["rollout.memory_fraction=0.6"], "rollout.memory_fraction=null"),
    ],
)
def test_a_plan_for_the_gpus_that_there_are_takes_no_others(keys: list[str], found: str) -> None:
    plan = fitted_plan(str(EXAMPLES / "planned/qwen3_30b_a3b.yaml"), keys, gpu_named("h100"), 8)
    assert {*(plan.keys or ())} >= {"rollout.sleep=true", found} and plan.decides == "colocated"
    assert page_of(plan).splitlines()[-1] == "the plan fits on 8 x H100 SXM"


@pytest.mark.slow
def test_dense_first_layers_that_are_no_whole_blocks_stay_in_bf16(tmp_path: Path) -> None:
    """GLM-4.5-Air's first layer is 10,944 wide."""
    config = json.loads((CONFIGS / "moonlight_16b_a3b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 10944}))
    (conflict, *_) = planned(str(tmp_path), "trainer.ep=8", gpu="h200", gpus=8).findings
    assert conflict.grade == "error" and conflict.remedy == (
        "It is the width of the dense first layer: numerics.first_layers_bf16=1 leaves it in BF16."
    )
    plan = fitted_plan(str(tmp_path), [], gpu_named("h200"), 8)
    assert plan.ok and plan.keys is not None and "numerics.first_layers_bf16=1" in plan.keys


def test_a_plan_of_a_model_alone_says_what_it_takes_for_granted() -> None:
    page = page_of(planned("qwen3_8b", gpus=8))
    assert "assumed without a spec: grpo, 32 prompts of 8 answers" in page
    page = page_of(planned(str(EXAMPLES / "arithmetic.yaml")))
    assert "assumed without" not in page and "on CPUs a trainer rank's process would peak at" in page


@pytest.mark.parametrize(
    ("model", "exact", "native"), [("qwen3_30b_a3b", 32, 4), ("qwen3_235b_a22b", 64, 4), ("qwen3_5_35b_a3b", 4, 2),
     ("glm_4_7_flash", 2, 2), ("qwen3_8b", 32, 8), ("deepseek_v3", 16, 16)],
)  # fmt: skip
def test_a_plan_says_how_many_ranks_an_engine_of_the_model_can_have(model: str, exact: int, native: int) -> None:
    """As heads, blocks of 128 and the other widths divide, worked out by hand. Only in exact mode ranks copy heads."""
    overrides = ("numerics.first_layers_bf16=1",) if model == "glm_4_7_flash" else ()
    plan = planned(model, *overrides, gpus=8)
    assert f"largest rollout.tp is {exact}, and on GPUs exact mode runs with 1" in page_of(plan)
    assert planned(model, *overrides, "numerics.mode=native", gpus=8).largest_engine_tp == native
