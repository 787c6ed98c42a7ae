"""A user's module may do anything while it is imported: it is one message each time."""

import os
from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.named_functions import named_object
from fp8rl.rollout.tasks.rewards.functions import RewardSection, load_function

RAISING_SIGNATURE = """
class Reward:
    @property
    def __signature__(self):
        raise RuntimeError("no signature")

    def __call__(self, answer): ...

reward = Reward()
"""


@pytest.mark.slow
def test_what_a_module_raises_is_said(tmp_path: Path) -> None:
    raising = "def __getattr__(name):\n    raise RuntimeError(name)"
    for text, expected in ((raising, "RuntimeError: reward"), (RAISING_SIGNATURE, "RuntimeError: no signature")):
        (tmp_path / "own.py").write_text(text)
        with pytest.raises(UserError, match=expected):
            load_function(RewardSection(function=f"{tmp_path / 'own.py'}:reward"), "rewards")


def test_a_file_of_python_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.py")
    with pytest.raises(UserError, match="rewards: found .*a pipe, no regular file"):
        named_object(f"{tmp_path / 'own.py'}:reward", "rewards", {})


def test_a_file_is_imported_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    said, module = tmp_path / "said", tmp_path / "counted.py"
    text = f"from pathlib import Path\nwith Path({str(said)!r}).open('a') as log: log.write('x')\n"
    for functions, times in (("def one(answer): return 1.0", 1), ("def one(answer): return 2.0", 2)):
        module.write_text(text + functions)
        first, second = (load_function(RewardSection(function=f"{module}:one"), "rewards.0") for _ in range(2))
        assert first.call is second.call and said.read_text() == "x" * times
