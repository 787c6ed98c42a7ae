"""The reference answers of the questions that a report shows, read from the run's data where they still lie."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fp8rl.numerics.errors import UserError
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rollout.data.sources import load_problems

MOST_READ = 100_000
"""Problems of a source that are looked through."""


def references(run: RunDir, questions: set[str]) -> dict[str, str]:
    """Return the reference answer of each question that the run's training data have once, by the question.

    Rollouts do not record it. The data may have been moved since, and a spec may be damaged: what is not found is left
    out.
    """
    found: dict[str, set[str]] = {}
    try:
        sources = read_resolved(run.experiment).data.training if questions else ()
    except UserError:
        return {}
    for source in sources:
        if not Path(source.path).exists():
            continue
        try:
            for problem in islice(load_problems(source), MOST_READ):
                if problem.question in questions:
                    found.setdefault(problem.question, set()).add(problem.answer)
        except UserError:
            continue
    return {question: next(iter(answers)) for question, answers in found.items() if len(answers) == 1}
