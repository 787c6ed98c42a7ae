"""The models and the data that the studies measure with."""

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fp8rl.numerics.core.errors import user_error
from tests.support.tiny_model import TinyModel, write_tiny_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
"""The checkout's: an installed package has no models and no data."""
MODEL = EXAMPLES / "models/tiny_qwen3_moe"
"""M: 2 layers, hidden 128, 8 experts, 1.0M parameters, trained on chains of sums."""
N = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2)
"""4 layers, hidden 512, 8 experts: 29M parameters, random."""
TRAIN, HELD_OUT = EXAMPLES / "data/arithmetic_train.jsonl", EXAMPLES / "data/arithmetic_eval.jsonl"


def check_subjects() -> None:
    """Raises UserError where the model or the data is not there."""
    for path in (MODEL / "config.json", TRAIN, HELD_OUT):
        if not path.is_file():
            raise user_error(
                "study",
                found=f"no {path}",
                expected="the model and the data of the repository's examples beside the package",
                remedy="Clone the repository, and run the studies with its own installation (`make install`).",
            )


def random_model(folder: Path, shape: TinyModel = N, seed: int = 0) -> Path:
    """A Hugging Face directory in `folder` with random weights."""
    path = folder / f"random_{abs(hash((shape, seed)))}"
    if not path.exists():
        disable_progress_bar()  # studies say how far they are
        write_tiny_model(path, shape, seed)
    return path
