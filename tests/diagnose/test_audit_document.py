"""The page on precision holds the map as it is."""

from fp8rl.diagnose.audit.document import PAGE, page
from tests.support.paths import ROOT


def test_the_table_of_the_page_is_the_map() -> None:
    text = (ROOT / PAGE).read_text()
    assert page(text) == text, "python -m fp8rl.diagnose.audit.document writes it"
