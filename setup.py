"""Adds to the wheel what `fp8rl demo` and `fp8rl init` need of examples/; all else is said in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = (
    "arithmetic.yaml",
    "first",
    "data/arithmetic_train.jsonl",
    "data/arithmetic_eval.jsonl",
    "models/tiny_qwen3_moe",
)


class WithExamples(build_py):
    def run(self) -> None:
        super().run()
        for source in () if self.editable_mode else (Path("examples", name) for name in EXAMPLES):
            target = Path(self.build_lib, "fp8rl", source)
            copy = shutil.copytree if source.is_dir() else shutil.copy
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(source, target)


setup(cmdclass={"build_py": WithExamples})
