"""`docs/studies.md`: the advice first, then every study with its claims, figures and tables."""

from __future__ import annotations

from collections.abc import Sequence

from rl.studies.claims import digest
from rl.studies.keeping import KEPT
from rl.studies.page import claims_table, markdown
from rl.studies.result import Result, read_result

HEAD = """# Studies

What the field claims about FP8 training, measured by commands that anyone can run: `fp8rl study --all`. This page is
written from `docs/studies/*.json` by `fp8rl study --keep`. Claims are numbered as in the four documents that the
project grew from: 000 (FP8 on Ironwood), 001 (BF16 on TPUs), 002 (what stays in BF16 and FP32), 003 (unified FP8).
Everything here was measured on tiny models and a CPU whose FP8 is emulated; nothing is extrapolated to larger ones.
"""


def document(results: Sequence[Result]) -> str:
    """The whole page in Markdown."""
    return "\n\n".join([HEAD.strip(), *(_section(result) for result in results)]) + "\n"


def _section(result: Result) -> str:
    name = result.study.name
    stored = read_result(KEPT / f"{name}.json")["claims_digest"]
    changed = [] if stored == digest(result.study.claims) else ["**The claims were changed after they were measured.**"]
    figures = [f"![{figure.stem}](studies/{figure.name})" for figure in sorted(KEPT.glob(f"{name}-*.svg"))]
    tables = [markdown(table) for table in [claims_table(result), *result.study.tables(result.measurement)]]
    caption = result.caption().replace("\n", "; ")
    return "\n\n".join([f"## {name}", result.study.question, *changed, caption, *figures, *tables])
