from docs.hooks.metrics import page
from fp8rl.rl.experiment.gate_rules import conditions
from fp8rl.rl.record.metrics import FAMILIES, METRICS, Metric, describe, metric, nearest_metric
from fp8rl.rl.report.charts import SECTIONS
from tests.support.experiments import experiment
from tests.support.paths import ROOT


def test_a_member_of_a_family_is_described_with_its_number() -> None:
    for name, meaning in (
        ("mismatch/router_agreement_layer_47", "of MoE layer 47,"),
        ("rollout/tokens_age_8", "sampled 8 weight versions before the trainer's; 8 means 8 or more"),
        ("mismatch/abs_diff_max_pos_256", "bucket from position 256 of"),
    ):
        described = describe(name)
        assert described is not None and described == metric(name) and meaning in described.meaning


def test_a_name_that_no_run_has_is_not_described() -> None:
    for name in ("router_agreement_layer_", "router_agreement_layer_03", "router_agreement_layer_-1", "abs_diff_pos_1"):
        assert describe(f"mismatch/{name}") is None and metric(f"mismatch/{name}").meaning == ""
    assert describe("drift/abs_diff_mean_age_9") is None is describe("drift/tokens_age_0")


def test_the_nearest_metric_may_be_a_member_of_a_family() -> None:
    assert nearest_metric("mismatch/abs_diff_mean_pos_65") == "mismatch/abs_diff_mean_pos_64"
    assert nearest_metric("mismatch/router_agreement_layr_3") == "mismatch/router_agreement_layer_3"


def test_every_metric_says_what_it_means() -> None:
    for name, described in METRICS.items():
        assert "/" in name and described.meaning.endswith(".")
    for name, family in FAMILIES.items():
        assert family.pattern.groups == name.count("{") and len(family.numbers) > 1


def test_the_committed_page_is_written_from_the_registry() -> None:
    """`make pages` writes it."""
    assert (ROOT / "docs/metrics.md").read_text() == page()


def test_every_curve_belongs_to_a_chart() -> None:
    titles = {title for looks in SECTIONS.values() for title in looks}
    assert titles == {described.chart[0] for described in every_metric() if described.chart} | {"Duration"}


def test_every_need_has_its_condition() -> None:
    assert conditions(experiment()).keys() == {need for described in every_metric() for need in described.needs}


def every_metric() -> list[Metric]:
    return [*METRICS.values(), *(family.metric for family in FAMILIES.values())]
