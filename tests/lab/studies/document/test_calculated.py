"""What calculation says to the claims of the source documents."""

from lab.studies.document.calculated import answers


def test_every_claim_that_can_be_calculated_has_a_figure_and_a_verdict() -> None:
    found = {answer.id: answer for answer in answers()}
    numbers = {
        "000": (1, 8, 11, 12, 13),
        "001": (4,),
        "002": (2, 17, 22, 23, 24, 25, 29),
        "003": (5, 6, 7, 13, 14, 15, 21, 28),
    }
    assert set(found) == {f"{document}-{each}" for document, each_of in numbers.items() for each in each_of}
    assert all(answer.figure and any(letter.isdigit() for letter in answer.figure) for answer in found.values())
    table = "FP8 weights 671 GB, BF16 shadow 1.34 TB, FP32 masters 2.68 TB, m and v 5.37 TB, BF16 gradients 1.34 TB"
    assert found["002-22"].figure == table + ": 11.4 TB" and found["002-22"].verdict == "confirmed"
    assert "7.9 GB" in found["002-23"].figure and "11.1 GB" in found["002-23"].figure
    assert found["002-23"].verdict == "contradicted"
    assert "1.277" in found["000-13"].figure and "43%" in found["000-13"].figure
    assert "8.72 TB" in found["002-17"].figure
