"""What ranks of tests have before they are forked: the trainer, what test modules import, since ranks unpickle their
functions, and which products of this machine depend on their rows."""

import gc
import importlib

import torch

from fp8rl.numerics.ops.linear import chooses_by_rows

for name in ("tests.support.trainer_imports", "tests.support.models", "fp8rl.rl.loop", "pytest"):
    importlib.import_module(name)
for dtype in (torch.bfloat16, torch.float32):
    chooses_by_rows(torch.device("cpu"), dtype)
gc.collect()
gc.freeze()  # or each fork walks through all that the imports have made
