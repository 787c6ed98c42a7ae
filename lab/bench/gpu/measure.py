"""Sizes and times of the GPU bench, and what its parts fill while they measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.bench.measure import Result

Side = TypeVar("Side")


@dataclass(frozen=True)
class Shape:
    """A product of T tokens with a weight [n, k]. Of experts, with `experts` weights and `top_k` of them per token."""

    name: str
    n: int
    k: int
    experts: int = 0
    top_k: int = 1


@dataclass(frozen=True)
class Layers:
    """A stack of MoE layers, in the words of an HF config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    moe_intermediate: int
    vocab: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of everything that the parts measure."""

    dense: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    tokens: tuple[int, ...]
    """Rows of the products."""
    quantized: tuple[tuple[int, int], ...]
    """Tokens and features of what the quantizers take."""
    stack: Layers
    """It is trained and synced."""
    exact: Layers
    """It is run as trainer and as engine."""
    batch: int
    """Sequences of a training step, each of `length` tokens."""
    length: int
    group: tuple[int, int, int]
    """Tokens of a prompt, its answers, and tokens of each."""
    decoded: tuple[int, ...]
    """Rows of a decode step, each over up to `context` keys."""
    context: int
    vocabulary: int
    """Of the logits that are drawn from, in so many `rows`."""
    rows: int
    attended: tuple[tuple[int, int], ...]
    """Rows, and keys of each, of a decode step's attention."""
    multiplied: tuple[int, ...]
    """Rows of the products whose bits are compared: batches of decode graphs, prefills, micro-batches."""
    served: Layers
    """The real engine serves it, in `prompts` times `answers` of `new_tokens`."""
    prompts: int
    answers: int
    new_tokens: int
    demo: int
    """Steps."""

    @classmethod
    def real(cls) -> Sizes:
        """Qwen3-30B-A3B and DeepSeek-V3; of the latter's 256 experts, the 32 of one rank of 8."""
        qwen = Layers(4, 2048, 32, 4, 128, 8, 768, 4096)  # a small vocabulary: it is the layers that are measured
        return cls(
            dense=(
                Shape("Qwen3-30B-A3B qkv", 5120, 2048),
                Shape("Qwen3-30B-A3B o", 2048, 4096),
                Shape("DeepSeek-V3 q_b", 24576, 1536),
                Shape("DeepSeek-V3 o", 7168, 16384),
                Shape("DeepSeek-V3 dense gate_up", 36864, 7168),
            ),
            experts=(
                Shape("Qwen3-30B-A3B gate_up", 1536, 2048, 128, 8),
                Shape("Qwen3-30B-A3B down", 2048, 768, 128, 8),
                Shape("DeepSeek-V3 gate_up", 4096, 7168, 32, 1),
                Shape("DeepSeek-V3 down", 7168, 2048, 32, 1),
            ),
            tokens=(16, 128, 1024, 4096, 16384),
            quantized=((16384, 2048), (16384, 7168)),
            stack=qwen,
            exact=Layers(2, 2048, 32, 4, 16, 8, 768, 4096),
            batch=4,
            length=4096,
            group=(512, 8, 64),
            decoded=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            context=1024,
            vocabulary=151_936,
            rows=256,
            attended=((256, 1024), (32, 32_768)),
            multiplied=(1, 8, 64, 256, 4096, 2, 4, 16, 32, 128, 512, 1024, 2048, 8192, *range(12, 256, 12), 1000, 4092),
            served=replace(qwen, layers=2, vocab=151_936),  # with the trainer's optimizer beside it in 80 GiB
            prompts=32,
            answers=8,
            new_tokens=256,
            demo=20,
        )

    @classmethod
    def tiny(cls) -> Sizes:
        """Every part in seconds under the interpreter."""
        small = Layers(1, 128, 2, 1, 4, 2, 128, 64)
        return cls(
            dense=(Shape("dense", 128, 256),),
            experts=(Shape("experts", 128, 128, 3, 2),),
            tokens=(16,),
            quantized=((16, 256),),
            stack=small,
            exact=small,
            batch=2,
            length=8,
            group=(20, 3, 5),
            decoded=(1, 3),
            context=5,
            vocabulary=300,
            rows=3,
            attended=((3, 130),),
            multiplied=(1, 5),
            served=replace(small, layers=2, vocab=128),
            prompts=4,
            answers=2,
            new_tokens=6,
            demo=2,
        )


class Measured:
    """The results of one part with the table behind them; each is handed on as it is found, to outlive the part."""

    def __init__(self, scratch: Path, say: Callable[[dict[str, Any]], object], timed: bool = True) -> None:
        """say: told of each thing. timed: times mean something here; without, they are kept and not told."""
        self.scratch, self._say, self._timed = scratch, say, timed
        self.results: list[Result] = []
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}

    def row(self, what: Mapping[str, Any], times: Mapping[str, float] | None = None) -> None:
        """A line of the table: `what` was measured, and what came of it that depends on the machine's speed."""
        self.rows.append({**what, **(times or {})})
        self._say({"row": {**what, **(times or {} if self._timed else {})}})

    def equal(self, what: str, different: float, **parts: float) -> None:
        """`what`, of which this much is not as it must be: 0 is the bar."""
        self.result(Result(f"d == 0: {what}", float(different), 0.0, False, parts), of_times=False)

    def bound(self, what: str, value: float, bar: float, **parts: float) -> None:
        """`what`, which is at most `bar` on any machine that computes as it should."""
        self.result(Result(what, value, bar, False, parts), of_times=False)

    def result(self, result: Result, of_times: bool = True) -> None:
        self.results.append(result)
        if self._timed or not of_times:
            self._say({"result": asdict(result)})

    def each_side(self, sides: Mapping[str, Side], measure: Callable[[str, Side], float]) -> dict[str, float]:
        """Measure each side by its name. A side that fails is left out with its error; the others are measured."""
        found = {}
        for name, side in sides.items():
            try:
                found[name] = measure(name, side)
            except (
                Exception
            ) as error:  # of a library that has not run on such a machine: a row of the others is worth more
                self.leave_out(name, f"{type(error).__name__}: {str(error)[:300]}")
        return found

    def ratios(self, what: str, unit: str, found: Mapping[str, float], bars: Iterable[tuple[str, str, float]]) -> None:
        """Judge the sides that were measured: (over, under, the least ratio of the two) for each bar."""
        for over, under, bar in bars:
            if over in found and under in found:
                parts = {f"{side} ({unit})": found[side] for side in (over, under)}
                self.result(Result(f"{what}, {over} / {under}", found[over] / found[under], bar, True, parts))

    def leave_out(self, what: str, why: str) -> None:
        if what not in self.left_out:
            self.left_out[what] = why
            self._say({"left_out": [what, why]})


_BUSY_CYCLES = 4_000_000
"""Of a GPU's clock, two milliseconds."""
_SHORT_S, _GRAPHED = 100e-6, 50
"""A call that takes less is measured in a CUDA graph of so many calls, too."""


class Stopwatch:
    """Times functions on a device: medians, with a cold L2 cache on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def seconds(self, run: Callable[[], object], repeats: int = 20, with_host: bool = False) -> float:
        """Median time of one call, after warming up.

        with_host: a GPU's waits for the host count, too, from an idle GPU on. Otherwise the kernels alone count: the
        GPU is busy with something else while the host launches them, which takes longer than many a kernel.
        """
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        cold = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            cold.amax()  # read, not written: what was written would go to memory while the call runs
            if with_host:
                torch.cuda.synchronize()
            else:
                torch.cuda._sleep(_BUSY_CYCLES)
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3

    def host_seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median time after which a call has returned, its kernels launched and not waited for."""
        run()
        times = []
        for _ in range(repeats if self.device.type == "cuda" else 1):
            self._wait()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        self._wait()
        return statistics.median(times)

    def graphed_seconds(self, run: Callable[[], object], calls: int = _GRAPHED) -> float:
        """Time of one call in a CUDA graph of so many. What it reads is in the L2 cache, as far as that holds it."""
        if self.device.type == "cpu":
            return self.seconds(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        return self.seconds(graph.replay, repeats=5) / calls

    def times(self, run: Callable[[], object]) -> dict[str, float]:
        """A call in columns: its kernels with a cold L2 cache, then what `beside` finds."""
        cold = self.seconds(run)
        return {"us": cold * 1e6, **self.beside(run, cold)}

    def beside(self, run: Callable[[], object], cold: float) -> dict[str, float]:
        """The host's time of a call whose kernels took `cold` seconds; of short ones also their time in a graph."""
        found = {"us of the host": self.host_seconds(run) * 1e6}
        return found if cold >= _SHORT_S else found | {"us in a graph, L2 warm": self.graphed_seconds(run) * 1e6}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def side_by_side(
        self, sides: Mapping[str, Callable[[], object]], rounds: int = 5, with_host: bool = False
    ) -> dict[str, float]:
        """Median of each side over rounds in which they take turns; with_host: as in `seconds`."""
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 if self.device.type == "cpu" else rounds):
            for name, run in sides.items():
                times[name].append(self.seconds(run, repeats=8, with_host=with_host))
        return {name: statistics.median(values) for name, values in times.items()}

    def copy_bandwidth(self) -> float:
        """Bytes per second of a device-to-device copy of a gigabyte, read and written bytes counted."""
        source = torch.empty(
            (1 << 30) if self.device.type == "cuda" else (1 << 16), dtype=torch.uint8, device=self.device
        )
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))


def random(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """BF16 normal numbers; never zeros, which GPUs multiply faster."""
    return (torch.randn(shape, device=device, dtype=torch.float32) * scale).bfloat16()


def written(shape: Layers, device: torch.device, folder: Path) -> Path:
    """The Hugging Face directory of such a model in `folder`. Its weights are drawn on `device`."""
    from tests.support.tiny_model import TinyModel, write_tiny_model

    model = TinyModel(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        intermediate=shape.moe_intermediate,
        experts=shape.experts,
        top_k=shape.top_k,
        vocab=max(shape.vocab, 128),
        max_positions=8192,
    )
    path = folder / f"{shape.layers}x{shape.hidden}x{shape.experts}x{shape.vocab}"
    if not path.exists():
        with device:
            write_tiny_model(path, model)
        torch.cuda.empty_cache()
    return path
