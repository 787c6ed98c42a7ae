"""Tables of lab fit the code and the page that they are of."""

from __future__ import annotations

import ast

import pytest

from lab.mutations import Mutation, mutations
from lab.written_tables import PAGE, with_precision_map
from tests.support.paths import ROOT


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_piece_and_is_still_a_program(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.find) == 1 and mutation.find != mutation.replace
    assert ast.dump(ast.parse(mutation.planted(text))) != ast.dump(ast.parse(text))
    assert all((ROOT / test).exists() for test in mutation.tests)


def test_the_table_of_the_page_is_the_map() -> None:
    text = (ROOT / PAGE).read_text()
    assert with_precision_map(text) == text, f"python -m lab.written_tables {PAGE} writes it"
