"""Python imports this at its start where the folder is on PYTHONPATH: it biases an engine (`harness.biased`).

An engine loads one plugin only, ours. So the bias waits until that plugin's draws are imported, and changes them then.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

DRAWS = "fp8rl.rollout.engine.plugin.sampling"


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != DRAWS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        spec.loader = _Biasing(spec.loader)
        return spec


class _Biasing(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        from lab.studies.harness.biased import install

        install(os.environ["BIASED_ENGINE"])


if "BIASED_ENGINE" in os.environ and "FP8RL_PLUGIN" in os.environ:
    sys.meta_path.insert(0, _Finder())
