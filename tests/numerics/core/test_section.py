"""The keys of nested mappings."""

from __future__ import annotations

from fp8rl.numerics.core.section import dotted


def test_dotted_keys_lead_to_every_value_and_an_empty_mapping_is_one() -> None:
    values = {"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": {}, "g": None}
    assert list(dotted(values)) == [("a.b.c", 1), ("a.d", [{"e": 2}]), ("f", {}), ("g", None)]
    assert list(dotted({"a": 1}, "above.")) == [("above.a", 1)]
