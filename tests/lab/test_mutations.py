"""The table of mutations fits the code that it would change."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from lab.mutations import ROOT, Mutation, mutations


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_piece_and_is_still_a_program(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.find) == 1 and mutation.find != mutation.replace
    assert ast.dump(ast.parse(mutation.planted(text))) != ast.dump(ast.parse(text))
    assert all((ROOT / test).exists() for test in mutation.tests)


def test_each_area_has_ten_and_each_has_a_name_of_its_own() -> None:
    areas = Counter(mutation.area for mutation in mutations())
    assert areas.keys() == {"numerics", "sync", "run"} and min(areas.values()) >= 10
    assert len({mutation.name for mutation in mutations()}) == areas.total()
