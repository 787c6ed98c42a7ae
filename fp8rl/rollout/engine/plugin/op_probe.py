"""Runs the engine's ops on a recording of the trainer's, one by one, and its whole program, for a recorder to watch.

Keys and values go to a separate cache, so the engine's state does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fp8rl.models.formats import Recorder, Sighting, address, own_formats
from fp8rl.models.lowering import lowered
from fp8rl.models.program import CHOSEN, LENGTHS, LOGITS, LOGPROBS, TARGETS, TEMPERATURE, TOKENS, Trace, constants, run
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.core.files import file_sha256
from fp8rl.numerics.precision_map import precision_map
from fp8rl.rollout.engine.plugin.host import EngineHost
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.engine.plugin.tokens import Recorded

ANSWER = "engine.safetensors"
"""Name of the answer's file, in the recording's directory: a recording of the engine's ops on the values of the
trainer's recording. Keys `free.site:name` are the FREE values of the engine's whole program."""
FREE = (CHOSEN, LOGITS, LOGPROBS.name)


@torch.no_grad()
def answer(runner: Any, path: Path) -> str:
    """Write the answer to a recording in a file. Return the SHA-256 of the answer's file. runner: SGLang's ModelRunner.
    Raises RuntimeError: the engine runs SGLang's own model, as in native mode."""
    host = _host(runner)
    recording = load_file(path, str(next(host.parameters()).device))
    host.tokens = Recorded(recording[LENGTHS], recording[TARGETS], float(recording[TEMPERATURE]))
    forward, on_trainers, free = host.definition.forward, Trace(), Trace(FREE)
    values: dict[str, Any] = {TOKENS: recording[TOKENS]}
    with dispatch.watched(on_trainers):
        for site in forward.sites():
            run([site], host, dict(values))
            values |= {name: recording[site.key(name)] for name in site.op.writes}
    with dispatch.watched(free):
        run(forward.sites(), host, {TOKENS: recording[TOKENS]})
    found = on_trainers.recording() | {f"free.{key}": value for key, value in free.recording().items()}
    found |= {name: torch.tensor(value, dtype=torch.float64) for name, value in constants(host.sizes).items()}
    save_file(found, path.with_name(ANSWER))
    return file_sha256(path.with_name(ANSWER))


@torch.no_grad()
def formats(runner: Any, sequences: Sequence[Sequence[int]]) -> list[Sighting]:
    """Run the program on some sequences, and say in which formats its tensors are. Raises RuntimeError as `answer`."""
    host = _host(runner)
    device, definition = next(host.parameters()).device, host.definition
    tokens = torch.tensor([token for row in sequences for token in row], device=device)
    host.tokens = Recorded(torch.tensor([len(row) for row in sequences], device=device), tokens, 1.0)
    adapters = [state().weights.low_rank(parameter) for parameter in host.parameters()]
    addresses = {address(each.a) for each in adapters if each is not None}
    plan = precision_map(host.numerics, own=own_formats(definition))
    recorder = Recorder(definition, host.numerics, plan, "engine", addresses)
    with dispatch.watched(recorder):
        run(lowered(definition, host.spec).sites(), host, {TOKENS: tokens})
    return recorder.sightings()


def _host(runner: Any) -> EngineHost:
    if not isinstance(runner.model, EngineHost):
        raise RuntimeError(
            "fp8rl plugin: found SGLang's own model, expected exact mode, in which both sides run one program. Compare "
            "log-probabilities and tensors"
        )
    return runner.model
