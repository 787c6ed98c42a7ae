"""The layers' inputs and outputs, a file for each call, in the folder that an environment variable names."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.qwen3_next import Qwen3GatedDeltaNet
from torch import Tensor

FOLDER = "FP8RL_RECORDED_LAYERS"

_own, _numbers = Qwen3GatedDeltaNet.forward, itertools.count()


def forward(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    found: Tensor = _own(self, hidden_states, forward_batch)
    decode = forward_batch.forward_mode.is_decode()
    counts = [1] * len(forward_batch.rids) if decode else forward_batch.extend_seq_lens.tolist()
    record = {
        "layer": self.layer_id,
        "requests": forward_batch.rids,
        "counts": counts,
        "positions": forward_batch.positions,
        "x": hidden_states,
        "y": found,
    }
    path = Path(os.environ[FOLDER]) / f"{next(_numbers):06}"
    torch.save(record, path)
    path.rename(path.with_suffix(".pt"))  # whole, or not seen
    return found


Qwen3GatedDeltaNet.forward = forward
