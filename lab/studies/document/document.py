"""`lab/docs/studies.md`: advice, what did not hold and what did, all 82 claims, and every study.

`fp8rl study --keep` writes it, and `python -m lab.studies.document` from what is kept already. The advice is prose,
written by hand from the verdicts (`advice.md`); the tables are made from results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8rl.numerics.core.files import write_atomically
from lab.studies.document.findings import CATALOGUE, ClaimFinding, findings, link, place, standings
from lab.studies.document.published_map import Rows
from lab.studies.harness.keeping import KEPT, kept, kept_figures, kept_formats
from lab.studies.harness.page import claims_table, grid, markdown
from lab.studies.harness.result import Result

HEAD = """# Studies

What the field claims about FP8 training, measured by commands that anyone can run: `fp8rl study --all` and `fp8rl
doctor`, and calculated with the planner of `fp8rl plan`. `fp8rl study --all --keep` writes this page from
`lab/docs/studies/`, and `python -m lab.studies.document` writes it again without measuring. Claims are numbered as in
the four documents that the project grew from: 000 (FP8 on Ironwood), 001 (BF16 on TPUs), 002 (what stays in BF16 and
FP32), 003 (unified FP8).

A claim says what is measured, in which direction and by what margin. Claims are data, committed before the full
run. A verdict is **confirmed**, **contradicted**, equivalent (the difference is smaller than the margin of the
claim) or undecided. Intervals are of 95%, and p-values are corrected within a study (Holm). In the tables, × says
how many times the value of another arm was found, and a sign marks a difference from another arm; nats are of a
token's log-probability, the mean over tokens; n counts seeds, or sequences of all seeds.

M and N are two tiny models, of 1.0 and 29 million parameters. Four *cases* of precision recur: in case 1 the trainer
is BF16 and the rollout FP8; in 2 the trainer's forward is FP8, too; in 3 also its backward; 4 is 3 with FP8 kernels,
which need a GPU.

All of this was measured on a CPU whose FP8 is emulated and, but for `pretrained`, on tiny models. Nothing is
extrapolated to larger models, and what only a GPU can show says so. Equal seeds give equal bits on one kind of
processor. Another kind rounds otherwise: between the two that this was measured on, no verdict turned into its
opposite, and 7 of 136 became undecided or ceased to be ([log](log_older.md), 2026-11-23)."""
ADVICE = Path(__file__).parent / "advice.md"
PAGE = Path("lab/docs/studies.md")
CHANGED = "**The claims were changed after they were measured.**"


def write_docs() -> None:
    """Write `lab/docs/studies.md` from what is kept."""
    write_atomically(PAGE, document(kept(), kept_formats()))


def document(results: Sequence[Result], formats: Rows) -> str:
    """The whole page in Markdown.

    Args:
        results: what is kept. formats: the kept table of formats; empty: there is none.
    """
    found = findings(results, formats)
    parts = (
        HEAD,
        ADVICE.read_text(encoding="utf-8").rstrip(),
        *_outcomes(found),
        *_catalogue(found),
        *map(_section, results),
    )
    return "\n\n".join(parts) + "\n"


def _outcomes(found: Sequence[ClaimFinding]) -> Iterator[str]:
    """First what did not hold. Controls are no claims, and the claims of every study stand with it as well."""
    says = {one.id: one.says for one in CATALOGUE}
    groups = (
        ("What did not hold", ("contradicted",)),
        ("What makes no difference", ("equivalent",)),
        ("What held", ("confirmed",)),
        ("What is undecided", ("undecided", "withheld", "waits for a GPU")),
    )
    for title, outcomes in groups:
        mine = [one for one in found if one.outcome in outcomes and not one.control]
        rows = [[one.id, one.says or says[one.number or ""], one.told, place(one.source)] for one in mine]
        rows += [
            [one.id, one.says, one.shown.why, link(one.shown.by)]
            for one in CATALOGUE
            if one.shown and one.shown.outcome in outcomes
        ]
        yield f"## {title}\n\n" + (grid(("claim", "it says", "found", "where"), rows) if rows else "Nothing.")


def _catalogue(found: Sequence[ClaimFinding]) -> Iterator[str]:
    rows = [[one.claim.id, one.claim.says, one.verdict, one.where] for one in standings(found)]
    yield f"## All {len(rows)} claims\n\n" + grid(("claim", "it says", "verdict", "where"), rows)


def _section(result: Result) -> str:
    name = result.study.name
    changed = [CHANGED] if result.claims_changed else []
    figures = [f"![{path.stem}]({path.relative_to(KEPT.parent).as_posix()})" for path in kept_figures(name)]
    tables = [markdown(table) for table in [claims_table(result), *result.study.tables(result.measurement)]]
    caption = result.caption().replace("\n", "; ")
    return "\n\n".join([f"## {name}", result.study.question, *changed, caption, *figures, *tables])
