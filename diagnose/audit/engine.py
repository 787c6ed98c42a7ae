"""What the engine holds, class by class of the precision map."""

from __future__ import annotations

from collections.abc import Iterable

from fp8rl.diagnose.audit.sighting import Sighting
from fp8rl.models import Model
from fp8rl.models.tensors import base_name
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.holdings import Holding, format_of
from fp8rl.numerics.precision_map import precision_map
from fp8rl.rollout.plugin.inventory import DERIVED, KV_CACHE, SCALES


def engine_sightings(held: Iterable[Holding], model: Model, numerics: NumericsConfig) -> list[Sighting]:
    """held: one rank's inventory (`rollout.plugin.inventory`). numerics: as planned."""
    plan = precision_map(numerics)
    kinds = {SCALES: "engine.scale", DERIVED: "engine.derived", KV_CACHE: "engine.kv_cache"}
    found = []
    for each in held:
        key = kinds.get(each.kind)
        if key is None:
            row = model.tensors[base_name(each.name)[0]]
            key = "engine.weight" if model.quantizes(row, numerics.rollout_spec) else "engine.leftover"
        # A router or an expert's bias may be in FP32.
        formats = (format_of(row.served),) if key == "engine.leftover" else plan[key].formats
        found.append(Sighting(key, each.name, each.format, formats, bytes=each.bytes))
    return found
