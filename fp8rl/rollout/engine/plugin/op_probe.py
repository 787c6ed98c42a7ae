"""Runs the engine's own ops on given inputs, one by one, and its own forward pass on given tokens.

A probe (`engine.protocol`) names a safetensors file with the trainer's recording (`models.trace`). Each op of the
engine, with whatever hooks are installed in it, gets the inputs that the trainer's op had. The answer is a second file
in the same directory. The engine's state is not touched: keys and values are kept in a separate cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.program import CHOSEN, LOGITS, LOGPROBS, RESIDUAL, TOKENS, OpSite
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, inputs, recorded
from fp8rl.numerics.core.files import file_sha256
from fp8rl.rollout.engine.plugin.families import Probed, Read, sides
from fp8rl.rollout.engine.plugin.state import state

ANSWER = "engine.safetensors"
"""Name of the answer, in the recording's directory.

Keys `site:out.name` and `site:each`, as in the recording: what the engine's op makes of the trainer's inputs.
Keys `free.*`: what the engine's whole forward pass makes of the tokens. They are `free.logits` [T, V], `free.logprobs`
FP32 [T], `free.stream` [layers, T, H] (the residual stream that goes into each layer), and with experts `free.chosen`
int64 [T, layers with experts, k].
Metadata: `settings`, constants of the ops as JSON.
"""


@torch.no_grad()
def answer(runner: Any, recording: Path) -> str:
    """Write the answer to a recording; return the SHA-256 of its bytes. `runner` is SGLang's ModelRunner."""
    with safe_open(recording, framework="pt") as file:
        record = {name: file.get_tensor(name) for name in file.keys()}
        temperature = float(file.metadata()["temperature"])
    engine = EngineOps(runner, state().weights.definition, record[LENGTHS], record[TARGETS], temperature)
    outputs: dict[str, Tensor] = {}
    for site in engine.sites:
        read = engine.on_device(inputs(record, site))
        outputs |= recorded(site, (), engine.run(site, read))
        if (each := engine.sides[site.op.form].each) is not None:
            outputs[site.key(EACH)] = each(engine.probed, engine.module(site), *read)
    tokens = next(record[site.key(f"in.{TOKENS}")] for site in engine.sites if TOKENS in site.op.reads)
    outputs |= {f"free.{name}": tensor for name, tensor in engine.forward(tokens).items()}
    path = recording.with_name(ANSWER)
    save_file(
        {name: t.cpu().contiguous().clone() for name, t in outputs.items()},
        path,
        {"settings": json.dumps(engine.settings())},
    )
    return file_sha256(path)


class EngineOps:
    """Runs the ops of SGLang's model, which `definition` lists, on the tokens of some sequences, end to end.

    lengths: int64 [sequences]. targets: int64 [T], the tokens whose log-probabilities the last op gives.
    """

    def __init__(self, runner: Any, definition: Model, lengths: Tensor, targets: Tensor, temperature: float) -> None:
        self.sites, self.sides = definition.forward.sites(), sides()
        self._model, self._device = runner.model, next(runner.model.parameters()).device
        self.probed = Probed(runner, definition.sizes, lengths.to(self._device), targets, temperature)

    def on_device(self, read: Read) -> Read:
        return [None if tensor is None else tensor.to(self._device) for tensor in read]

    def run(self, site: OpSite, read: Read) -> tuple[Tensor, ...]:
        """Return what one op writes."""
        # SGLang writes some results into its inputs.
        given = (None if tensor is None else tensor.clone() for tensor in read)
        return self.sides[site.op.form].run(self.probed, self.module(site), *given)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Run the whole forward pass, op after op."""
        values: dict[str, Tensor] = {TOKENS: tokens.to(self._device)}
        streams: dict[int, Tensor] = {}
        chosen = []
        for site in self.sites:
            values |= zip(site.op.writes, self.run(site, [values.get(name) for name in site.op.reads]), strict=True)
            if site.layer is not None and RESIDUAL in site.op.writes:
                streams.setdefault(site.layer, values[RESIDUAL])
            if CHOSEN in site.op.writes:
                chosen.append(values[CHOSEN].sort(-1).values)
        found = {
            LOGITS: values[LOGITS],
            LOGPROBS.name: values[LOGPROBS.name],
            "stream": torch.stack(list(streams.values())),
        }
        return found | ({CHOSEN: torch.stack(chosen, 1)} if chosen else {})

    def settings(self) -> dict[str, float]:
        """Return the constants of the ops by name; a value is taken from the first op that has the constant."""
        found: dict[str, float] = {}
        for at in reversed(self.sites):
            if (read := self.sides[at.op.form].constants) is not None:
                found |= zip(at.op.form.constants, map(float, read(self.module(at))), strict=True)
        return found

    def module(self, site: OpSite) -> Any:
        owner = self._model if site.layer is None else self._model.model.layers[site.layer]
        return owner.get_submodule(site.op.engine)
