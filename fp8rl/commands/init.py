"""`fp8rl init`: a first experiment of one's own, a folder with a spec, a reward, data, a model, and what to change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands import EXAMPLES, show, user_errors
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.files import check_writable, new_directory, writing

MODEL = EXAMPLES / "models/tiny_qwen3_moe"
SCHEMA = Path(__file__).parents[1] / "spec.schema.json"
"""A model of half a million parameters that has seen sums."""
_FILES = {
    "spec.yaml": """\
# yaml-language-server: $schema=spec.schema.json
# GRPO with a reward of one's own, in FP8 on both sides: fp8rl train spec.yaml
run: {name: first, steps: 30}
model: {path: model}
numerics: {mode: exact, preset: fp8_block_pow2, trainer: fp8, rollout: fp8}
data: {train: data.jsonl, eval: data.jsonl}
rewards: [{function: "reward.py:right"}]
rollout: {prompts_per_step: 10, group_size: 8, max_new_tokens: 20}
trainer: {lr: 1.0e-4}
algorithm: {name: grpo}
eval: {problems: 5}
gates: [{metric: mismatch/train_rollout_logprob_abs_diff_max, above: 0.0, action: warn}]
""",
    "reward.py": '''\
"""The reward of an answer: 1 if it ends with the reference, else 0."""


def right(answer: str, reference: str) -> float:
    return 1.0 if answer.endswith(reference) else 0.0
''',
    "data.jsonl": """\
{"question": "9+4+5-8=?", "answer": "#### 10"}
{"question": "7-2+6+3=?", "answer": "#### 14"}
{"question": "8+8-5+1=?", "answer": "#### 12"}
{"question": "3+9-4+7=?", "answer": "#### 15"}
{"question": "6-1+8-9=?", "answer": "#### 4"}
""",
    "README.md": """\
# A first experiment

    fp8rl doctor spec.yaml     # shows the first prompt and the reward of its reference; starts nothing
    fp8rl train spec.yaml      # 30 steps, then runs/first/report.html
    fp8rl runs                 # lists the runs; fp8rl runs A B compares two

| to | change |
|---|---|
| ask other questions | `data.jsonl`, a question and a reference answer per line |
| reward something else | `reward.py`; its parameters say what it receives (`answer`, `reference`, `question`, ...) |
| train another model | `model.path` in `spec.yaml`, a Hugging Face directory |
| change a setting once | `fp8rl train spec.yaml run.name=second trainer.lr=2e-4` |

`spec.schema.json` has every key: editors with a YAML language server complete and check `spec.yaml` by it.
`fp8rl --install-completion` makes the shell complete commands, keys and names of runs.
""",
}


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a first experiment that runs as it is: a spec, a reward, problems, a tiny model, and what to change."""
    with user_errors():
        check_writable(folder, "DIR")
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise user_error(
                "DIR", found=str(folder), expected="a new folder, or an empty one", remedy="Choose another name."
            )
        files = {**_FILES, "spec.schema.json": SCHEMA.read_text()}
        with writing(folder, "DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            with new_directory(folder / ".new") as whole:  # a disk that is full leaves nothing
                shutil.copytree(MODEL, whole / "model")
                for name, text in files.items():
                    (whole / name).write_text(text)
            for path in (folder / ".new").iterdir():
                path.rename(folder / path.name)
            (folder / ".new").rmdir()
        for name in (*files, "model"):
            show(str(folder / name), soft_wrap=True)
        show(f"\ncd {folder} && fp8rl train spec.yaml", soft_wrap=True)
