"""The page on precision holds the map as it is."""

from lab.written_tables import PAGE, with_precision_map
from tests.support.paths import ROOT


def test_the_table_of_the_page_is_the_map() -> None:
    text = (ROOT / PAGE).read_text()
    assert with_precision_map(text) == text, f"python -m lab.written_tables {PAGE} writes it"
