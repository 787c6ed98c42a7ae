"""All that a trainer's rank imports, and nothing that starts a thread: processes are forked from one that has it."""

import importlib
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # whichever test is the first to start it
from fp8rl.trainer.megatron import patches

patches.install()  # as `trainer.distributed.parallel.initialize` does, before Megatron is imported
importlib.import_module("fp8rl.trainer.roles")
