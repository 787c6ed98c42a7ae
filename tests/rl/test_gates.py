from rl.gates import Gates
from rl.spec.sections import GateSection

METRIC = "mismatch/tis_clipfrac"


def test_a_gate_fires_once_after_enough_steps_in_a_row_and_arms_again() -> None:
    gates = Gates([GateSection(metric=METRIC, above=0.05, for_steps=2)])
    values = [0.06, 0.04, 0.06, 0.07, 0.08, 0.05, 0.06, 0.06]
    fired = [len(gates.check({METRIC: value})) for value in values]
    assert fired == [0, 0, 0, 1, 0, 0, 0, 1]


def test_the_bound_itself_is_fine_on_either_side() -> None:
    gates = Gates([GateSection(metric=METRIC, above=0.0), GateSection(metric="mismatch/exact_frac", below=1.0)])
    assert gates.check({METRIC: 0.0, "mismatch/exact_frac": 1.0}) == []
    fired = gates.check({METRIC: 1e-9, "mismatch/exact_frac": 0.5})
    assert [str(firing) for firing in fired] == [
        "warn: mismatch/tis_clipfrac = 1e-09 is above 0.0",
        "warn: mismatch/exact_frac = 0.5 is below 1.0",
    ]


def test_a_step_without_the_metric_changes_nothing() -> None:
    gates = Gates([GateSection(metric=METRIC, above=0.05, for_steps=2)])
    assert gates.check({METRIC: 0.06}) == []
    assert gates.check({}) == []
    (firing,) = gates.check({METRIC: 0.06})
    assert str(firing).endswith("is above 0.05 for 2 steps")


def test_gates_count_on_their_own() -> None:
    gates = Gates([GateSection(metric=METRIC, above=0.1), GateSection(metric=METRIC, above=0.5)])
    assert [firing.rule.above for firing in gates.check({METRIC: 0.2})] == [0.1]
    assert [firing.rule.above for firing in gates.check({METRIC: 0.6})] == [0.5]
