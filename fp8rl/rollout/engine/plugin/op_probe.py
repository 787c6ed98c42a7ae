"""Runs the engine's ops on given inputs, one by one, and its whole program on given tokens.

A probe (`engine.protocol`) names a safetensors file with the trainer's recording (`models.trace`). Each op of the
program gets the inputs that the trainer's op had. The answer is a second file in the same directory. The engine's state
is not touched: keys and values are kept in a separate cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.models.formats import Recorder, Sighting, address, own_formats
from fp8rl.models.lowering import lowered
from fp8rl.models.program import CHOSEN, EMBED, LOGITS, LOGPROBS, RESIDUAL, TOKENS, OpSite, constants, run
from fp8rl.models.trace import EACH, LENGTHS, TARGETS, inputs, recorded
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.core.files import file_sha256
from fp8rl.numerics.precision_map import precision_map
from fp8rl.rollout.engine.plugin.host import EngineHost
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.engine.plugin.tokens import Recorded

ANSWER = "engine.safetensors"
"""Name of the answer, in the recording's directory.

Keys `site:out.name` and `site:each`, as in the recording: what the engine's op makes of the trainer's inputs.
Keys `free.*`: what the engine's whole program makes of the tokens. They are `free.logits` [T, V], `free.logprobs`
FP32 [T], `free.stream` [layers, T, H] (the residual stream that goes into each layer), and with experts `free.chosen`
int64 [T, layers with experts, k].
Metadata: `settings`, constants of the ops as JSON.
"""

Read = Sequence[Tensor | None]


@torch.no_grad()
def answer(runner: Any, recording: Path) -> str:
    """Write the answer to a recording; return the SHA-256 of its bytes. `runner` is SGLang's ModelRunner.

    Raises:
        RuntimeError: the engine runs SGLang's own model, as in native mode.
    """
    host = _host(runner)
    device = next(host.parameters()).device
    with safe_open(recording, framework="pt") as file:
        record = {name: file.get_tensor(name).to(device) for name in file.keys()}
        temperature = float(file.metadata()["temperature"])
    host.tokens = Recorded(record[LENGTHS], record[TARGETS], temperature)
    outputs: dict[str, Tensor] = {}
    for site in (sites := host.definition.forward.sites()):
        read = inputs(record, site)
        outputs |= recorded(site, (), run_op(host, site, read))
        if CHOSEN in site.op.reads:
            outputs[site.key(EACH)] = each_expert(host, site, read)
    tokens = next(record[site.key(f"in.{TOKENS}")] for site in sites if TOKENS in site.op.reads)
    outputs |= {f"free.{name}": tensor for name, tensor in free_forward(host, tokens).items()}
    path = recording.with_name(ANSWER)
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in outputs.items()}
    save_file(tensors, path, {"settings": json.dumps(constants(host.sizes))})
    return file_sha256(path)


def run_op(host: EngineHost, site: OpSite, read: Read) -> tuple[Tensor, ...]:
    """Return what one op writes, given what it reads. In a recording, probabilities are of all experts, [T, E]."""
    if CHOSEN in site.op.reads:
        x, probs, chosen, *shared = read
        assert probs is not None and chosen is not None
        read = [x, probs.gather(1, chosen), chosen.int(), *shared]
    written = tuple(site.op.form.compute(host, site, *read))
    if CHOSEN not in site.op.writes:
        return written
    (logits,), (probs, chosen) = read, written
    assert logits is not None
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen.long(), probs), chosen.long()


def each_expert(host: EngineHost, site: OpSite, read: Read) -> Tensor:
    """Return each expert's output for its tokens, [T, k, H]: the op runs with all other probabilities at zero."""
    x, probs, chosen = read[:3]
    assert x is not None and probs is not None and chosen is not None
    weights, alone = probs.gather(1, chosen), torch.eye(chosen.shape[1], device=x.device)
    return torch.stack([host.experts(site, x, weights * only, chosen.int()) for only in alone], 1)


def free_forward(host: EngineHost, tokens: Tensor) -> dict[str, Tensor]:
    """Run the program, not lowered, on the tokens of `host.tokens`."""
    streams: dict[int, Tensor] = {}
    chosen = []

    def watch(site: OpSite, read: Read, written: Sequence[Tensor]) -> None:
        values = dict(zip(site.op.writes, written))
        if site.layer is not None and RESIDUAL in values:
            streams.setdefault(site.layer, values[RESIDUAL])
        if CHOSEN in values:
            chosen.append(values[CHOSEN].long().sort(-1).values)

    values = run(host.definition.forward.sites(), host, {TOKENS: tokens}, watch)
    found = {name: values[name] for name in (LOGITS, LOGPROBS.name)} | {"stream": torch.stack(list(streams.values()))}
    found[LOGITS] = found[LOGITS][:, : host.sizes.vocab_size]
    return found | ({CHOSEN: torch.stack(chosen, 1)} if chosen else {})


@torch.no_grad()
def formats(runner: Any, sequences: str) -> list[Sighting]:
    """Run the program on some sequences, a JSON list of lists of tokens, and say in which formats its tensors are.

    Raises RuntimeError as `answer` does.
    """
    host, rows = _host(runner), json.loads(sequences)
    device, definition = next(host.parameters()).device, host.definition
    tokens = torch.tensor([token for row in rows for token in row], device=device)
    host.tokens = Recorded(torch.tensor([len(row) for row in rows], device=device), tokens, 1.0)
    adapters = [state().weights.low_rank(parameter) for parameter in host.parameters()]
    plan = precision_map(host.numerics, own=own_formats(definition))
    recorder = Recorder(
        definition, host.numerics, plan, "engine", {address(each.a) for each in adapters if each is not None}
    )

    def watch(site: OpSite, read: Read, written: Sequence[Tensor]) -> None:
        values = dict(zip(site.op.writes, written))
        if site.op.form is EMBED:
            recorder.note("embedding.output", site.op.name, recorder.found("embedding.output", written[0]))
        elif RESIDUAL in values:
            recorder.note("residual", f"layers.{site.layer}", recorder.found("residual", values[RESIDUAL]))

    with dispatch.watched(recorder):
        run(lowered(definition, host.spec).sites(), host, {TOKENS: tokens}, watch)
    return recorder.sightings()


def _host(runner: Any) -> EngineHost:
    if not isinstance(runner.model, EngineHost):
        raise RuntimeError(
            "fp8rl plugin: found SGLang's own model, expected exact mode, in which both sides run one program. Compare "
            "log-probabilities and tensors"
        )
    return runner.model
