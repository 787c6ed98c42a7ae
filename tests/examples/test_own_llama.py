"""An architecture in a file of a user's: read, planned, trained as transformers computes it, and served."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fp8rl.models import architecture, load_architecture, read_model, read_shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.experiment.contents import contents
from fp8rl.rl.experiment.preconditions import check
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.trainer.config import TrainerSection
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.batches import cross_entropy, random_batch
from tests.support.commands import result_of
from tests.support.paths import EXAMPLES
from tests.support.preconditions import edit_config
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.trainers import trainer_on

pytestmark = pytest.mark.slow

FILE = str(EXAMPLES / "own_llama.py")
SPEC = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
PLAIN = {"spec": QuantSpec.preset("bf16"), "rollout": "bf16"}


@pytest.fixture(autouse=True)
def nothing_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_known", {})
        yield


def write(path: Path) -> Path:
    """A Llama of random FP32 weights large enough to matter, and a tokenizer."""
    write_tiny_model(path, TinyModel(experts=0))
    torch.manual_seed(0)
    widths = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 2048}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**widths, **heads, tie_word_embeddings=True)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.08 * torch.randn_like(parameter) + float(parameter.dim() == 1))
    made.save_pretrained(path)
    edit_config(path, architectures=["OurLlamaForCausalLM"])
    return path


def test_an_architecture_that_is_not_known_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_model(write(tmp_path / "model"))
    said = str(error.value)
    assert "found 'OurLlamaForCausalLM'" in said and "model.architecture=path/to/file.py" in said
    assert said.count("Qwen3MoeForCausalLM") == 1 and "docs/models.md, 'How to add the next'" in said


def test_the_trainer_computes_what_transformers_does_and_learns(tmp_path: Path, layout) -> None:
    load_architecture(FILE)
    model = write(tmp_path / "model")
    tokens = torch.randint(0, 128, (3, 70), generator=torch.Generator().manual_seed(1))
    config = TrainerSection(lr=1e-3, warmup_steps=0)
    exact = trainer_on(layout, config, model, "bf16", PLAIN, dtype=torch.float32)
    with torch.no_grad():
        logits = exact.model(tokens, position_ids=None, attention_mask=None)
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    stored = load_file(model / "model.safetensors")
    assert read_shape(model).parameters == sum(tensor.numel() for tensor in stored.values())
    trainer, batch = trainer_on(layout, config, model), random_batch(2, 60)
    losses = [float(trainer.train_step(batch, cross_entropy(batch)).result.loss) for _ in range(3)]
    assert losses[2] < losses[0] and dict(trainer.weights.share(trainer.model)).keys() == stored.keys()


def spec(folder: Path, file: str = FILE, **sections: object) -> Path:
    values = {
        "model": {"path": str(write(folder / "model")), "architecture": file},
        "numerics": {"trainer": "fp8", "rollout": "fp8"},
        "data": {"train": str(EXAMPLES / "data/arithmetic_train.jsonl")}, "eval": {"problems": 0},
        "rollout": {"context_length": 256}, **sections,
    }  # fmt: skip
    (folder / "spec.yaml").write_text(json.dumps(values))
    return folder / "spec.yaml"


def test_a_spec_that_names_the_file_passes_the_checks_and_a_resumed_run_compares_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_bytes(Path(FILE).read_bytes())
    experiment = load_experiment(spec(tmp_path, "own.py"))
    assert experiment.model.architecture == str(tmp_path / "own.py"), "relative to the spec"
    assert check(experiment).architecture.name == "OurLlamaForCausalLM"
    before = contents(experiment)["model.architecture"]
    with (tmp_path / "own.py").open("a") as file:
        file.write("# other\n")
    assert contents(experiment)["model.architecture"] != before
    model = experiment.model.model_copy(update={"path": str(EXAMPLES / "models/tiny_qwen2")})
    with pytest.raises(UserError, match=r"architecture: found .*own.py with OurLlamaForCausalLM'.*Qwen2ForCausalLM\."):
        check(experiment.model_copy(update={"model": model}))
    assert expected_report(SPEC, architecture=FILE).code != expected_report(SPEC).code


def test_the_process_of_an_engine_s_owner_reads_the_file_too(tmp_path: Path) -> None:
    """As the engine's own does in test_own_kimi_linear.py."""
    load_architecture(FILE)
    convert_checkpoint(write(tmp_path / "model"), tmp_path / "served", SPEC.rollout_spec)
    architecture._known.clear()
    Engine(RolloutSection(), tmp_path / "log", {"numerics": SPEC.to_dict(), "architecture": FILE})
    assert read_model(tmp_path / "served", served=True).architecture.name == "OurLlamaForCausalLM"


def test_commands_that_take_a_model_take_the_file(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    refused = result_of("convert", model, tmp_path / "out")
    assert refused.exit_code == 2 and "model.architecture=path/to/file.py" in refused.output
    done = result_of("convert", model, tmp_path / "out", "--architecture", FILE)
    assert done.exit_code == 0, done.output
    architecture._known.clear()
    planned = result_of("plan", model, "--gpu=h100", f"model.architecture={FILE}")
    assert planned.exit_code in (0, 1), planned.output
