"""Gradients and weights between two data-parallel ranks: what arrives, against float64, and the bytes sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.numerics.quantize import fake_quantize
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.inventory import Transfer, transfers
from tests.support.batches import cross_entropy, random_batch
from tests.support.ranks import run_on_ranks
from tests.support.trainers import POW2, in_fp8, save_checkpoint, trainer_on

NARROW = ("bf16", "e4m3", "e5m2")
BATCH: dict[str, Any] = {"rows": 6, "longest": 40}


def sent_by(heard: list[Transfer], *collectives: str) -> int:
    """Bytes that this rank gives to these of torch's collectives."""
    return sum(one.bytes for one in heard if one.collective.startswith(collectives))


@dataclass(frozen=True)
class Case:
    moe_path: Path
    folder: Path

    def __call__(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        def keys(**changes: str) -> TrainerSection:
            return config.model_copy(update=changes)

        narrow = keys(gradient_wire="e5m2", weight_gather="e4m3")
        return {
            "sums": {wire: self._sum(layout, wire) for wire in NARROW},
            "steps": {wire: self._step(layout, keys(gradient_wire=wire)) for wire in ("fp32", *NARROW)},
            "gathers": {form: self._gathered(layout, keys(weight_gather=form)) for form in ("bf16", "e4m3")},
            "formats": {"narrow": self._watched(layout, narrow, narrow), "wide": self._watched(layout, narrow, config)},
        }

    def _watched(self, layout: Layout, config: TrainerSection, planned: TrainerSection):
        from fp8rl.diagnose.doctor.watch import watch_step

        trainer, batch = trainer_on(layout, config, self.moe_path), random_batch(**BATCH)
        return watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, planned)

    def _sum(self, layout: Layout, wire: Any) -> dict[str, Any]:
        from fp8rl.trainer.distributed.wires import reduce_scatter

        given = numbers(layout.rank)
        with transfers() as sent:
            total = reduce_scatter(given, wire, dist.group.WORLD)
        broken = given.clone()
        broken[5] = math.inf
        half = sent_by(sent, "alltoall") // 2
        return {"total": total, "sent": half, "broken": reduce_scatter(broken, wire, dist.group.WORLD)}

    def _step(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        trainer = trainer_on(layout, config, self.moe_path)
        batch = random_batch(**BATCH)
        with transfers() as sent:
            norm = trainer.forward_backward(batch, cross_entropy(batch)).result.grad_norm
        return {"norm": norm, "sent": sent_by(sent, "reduce_scatter", "alltoall")}

    def _gathered(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        from fp8rl.trainer.modules.weights import named_weights

        trainer = trainer_on(layout, config, self.moe_path)
        batch = random_batch(**BATCH)
        out: dict[str, Any] = {"weights' bytes": sum(each.param_data.nbytes for each in trainer.optimizer.buffers)}
        for step in range(2):
            trainer.forward_backward(batch, cross_entropy(batch))
            with transfers() as sent:
                trainer.update()
            # Of a gather a rank gives its half, of broadcasts both ranks' halves.
            out[f"sent {step}"] = sent_by(sent, "allgather_into", "allreduce") + sent_by(sent, "broadcast") // 2
            out[f"scores {step}"] = trainer.score(batch)
        out["weights"] = {name: p.detach().clone() for name, p in named_weights(trainer.model)}
        out["in fp8"] = in_fp8(trainer)
        saved = self.folder / config.weight_gather
        save_checkpoint(trainer, saved, {})
        resumed = trainer_on(layout, config, self.moe_path)
        resumed.load(saved)
        for each in (trainer, resumed):
            each.train_step(batch, cross_entropy(batch))
        out["resumed"] = torch.equal(trainer.score(batch)[1], resumed.score(batch)[1])
        trainer.set_numerics(replace(trainer.numerics, trainer="bf16"))
        trainer.train_step(batch, cross_entropy(batch))
        out["bf16 trainer"] = {name: p.detach().clone() for name, p in named_weights(trainer.model)}
        return out


def numbers(rank: int) -> Tensor:
    """Gradients of many sizes; half of them is no whole number of groups of 128."""
    generator = torch.Generator().manual_seed(rank)
    size = 2 * 5 * 192
    return torch.randn(size, generator=generator) * torch.randn(
        size // 64, generator=generator
    ).exp().repeat_interleave(64)


def group_max(x: Tensor) -> Tensor:
    groups = F.pad(x.abs(), (0, -len(x) % 128)).view(-1, 128)
    return groups.amax(1).repeat_interleave(128)[: len(x)]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = TrainerSection(dp=2, lr=1e-2, warmup_steps=0, micro_batch_tokens=256)
    folder = tmp_path_factory.mktemp("wires")
    return run_on_ranks(config, folder / "ranks", Case(moe_path, folder))


@pytest.mark.parametrize(
    ("wire", "error", "share"), [("bf16", 2**-8, 0.5), ("e4m3", 2**-4, 0.26), ("e5m2", 2**-3, 0.26)]
)
def test_a_sum_is_that_of_the_rounded_parts(ranks: Any, wire: str, error: float, share: float) -> None:
    given = [numbers(rank).double() for rank in range(2)]
    for rank, part in enumerate((slice(0, 960), slice(960, None))):
        found = ranks[rank]["sums"][wire]
        exact = given[0][part] + given[1][part]
        # To nearest, or within half of the smallest step of its group of 128: 2^-10 of 448, 2^-17 of 57344.
        smallest = {"bf16": 0.0, "e4m3": 2**-10 / 448, "e5m2": 2**-17 / 57344}[wire]
        bound = sum(x[part].abs() * error + group_max(x[part]) * smallest for x in given) + exact.abs() * 2**-23
        assert ((found["total"].double() - exact).abs() <= bound).all()
        assert 0 < found["sent"] <= share * 960 * 4
        assert not found["broken"].isfinite().all() if rank == 0 else found["broken"].isfinite().all()


def test_a_step_sends_a_quarter_in_fp8_and_its_gradients_are_nearly_the_same(ranks: Any) -> None:
    for rank in ranks:
        steps = rank["steps"]
        for wire in NARROW:
            assert steps[wire]["norm"] == ranks[0]["steps"][wire]["norm"]
            assert steps[wire]["norm"] == pytest.approx(steps["fp32"]["norm"], rel=0.02)
        assert steps["bf16"]["sent"] == steps["fp32"]["sent"] / 2
        assert steps["e4m3"]["sent"] == steps["e5m2"]["sent"] <= 0.27 * steps["fp32"]["sent"]


def test_weights_that_arrive_as_codes_are_what_the_forward_would_have_quantized(ranks: Any) -> None:
    for rank in ranks:
        plain, coded = rank["gathers"]["bf16"], rank["gathers"]["e4m3"]
        for step in range(2):
            assert torch.equal(plain[f"scores {step}"][1], coded[f"scores {step}"][1])
            # Each weight once, though there are two optimizers.
            assert plain[f"sent {step}"] == plain["weights' bytes"] // 2
            assert coded[f"sent {step}"] < 0.6 * plain[f"sent {step}"]
        quantized = set(coded["in fp8"])
        assert 0 < len(quantized) < len(plain["weights"])
        for name, weight in plain["weights"].items():
            expected = fake_quantize(weight, POW2.weight) if name in quantized else weight
            assert torch.equal(coded["weights"][name], expected), name
            assert torch.equal(coded["weights"][name], ranks[0]["gathers"]["e4m3"]["weights"][name])
        assert plain["resumed"] and coded["resumed"]
        assert any(not torch.equal(coded["weights"][name], plain["weights"][name]) for name in quantized)
    for name, weight in plain["bf16 trainer"].items():  # which has gathered BF16
        torch.testing.assert_close(coded["bf16 trainer"][name], weight, rtol=0.02, atol=2e-2)


def test_the_format_on_a_wire_is_seen(ranks: Any) -> None:
    for rank in ranks:
        assert differences_of(rank["formats"]["narrow"]) == []
        found = {each.key: (each.found, each.expected) for each in differences_of(rank["formats"]["wide"])}
        assert found == {"gradient.wire": ("e5m2", "fp32"), "wire.weights": ("e4m3", "bf16")}
