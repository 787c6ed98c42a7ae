"""Both sides on the same tokens: the trainer's ops recorded, and the engine's answer to the recording."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8rl.models.trace import OpTrace
from fp8rl.rollout.errors import EngineError
from fp8rl.rollout.plugin.op_probe import ANSWER
from fp8rl.rollout.server.client import EngineClient


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine made of a recorded forward pass.

    tensors: see `rollout.plugin.op_probe.ANSWER`. settings: constants of the engine's ops, such as `rope_theta`.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, float]


async def ask_engine(client: EngineClient, trace: OpTrace, temperature: float) -> EngineAnswer:
    """The engine's own ops on the trainer's inputs, and its own forward of the same tokens. Host and disk are shared.

    Raises:
        EngineError: the engine failed, or its answer is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="fp8rl-ops-") as folder:
        recording = Path(folder) / "trainer.safetensors"
        save_file(trace.tensors, recording, {"temperature": repr(temperature)})
        digest = (await client.probe(recording)).sha256
        path = recording.with_name(ANSWER)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise EngineError(f"{path}: found other bytes than the engine wrote. Look for a full disk, and try again.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return EngineAnswer(tensors, json.loads(file.metadata()["settings"]))
