"""Settings that contradict each other, the mode or the model's context."""

from fp8rl.rl.experiment import parse_experiment
from fp8rl.rl.experiment.preconditions import check
from tests.support.preconditions import merged, refusal


def test_the_context_must_fit_the_model_and_the_cache(values):
    assert "max_position_embeddings" in refusal(values, rollout={"context_length": 4096})
    assert refusal(values, rollout={"max_new_tokens": 1024}).startswith("rollout.max_new_tokens")
    assert refusal(values, rollout={"max_total_tokens": 1023}).startswith("rollout.max_total_tokens")


def test_rows_end_to_end_take_an_attention_that_knows_them(values, monkeypatch):
    assert refusal(values, trainer={"packing": True}, numerics={"mode": "native"}).startswith("trainer.packing: found")
    check(parse_experiment(merged(values, trainer={"packing": True})))
    monkeypatch.setattr("fp8rl.rl.experiment.preconditions.rules.has_transformer_engine", lambda: True)
    check(parse_experiment(merged(values, trainer={"packing": True}, numerics={"mode": "native"})))
