"""Where things lie in the repository."""

from pathlib import Path

from fp8rl.rl.record.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SPECS = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("planned/*.yaml")])
CONFIGS = ROOT / "fp8rl/diagnose/plan/configs"
REAL_SPECS = {
    "qwen3_4b_one_gpu": "h100", "qwen3_4b_lora_one_gpu": "h100", "qwen3_30b_a3b_lora_one_gpu": "h100",
    "qwen3_30b_a3b": "h200", "qwen3_235b_a22b": "h200", "glm_4_7_flash": "h200", "moonlight_16b_a3b": "h100",
    "llama_3_1_8b": "h100", "deepseek_v3": "h200", "qwen3_5_35b_a3b": "h200", "qwen3_5_35b_a3b_lora_one_gpu": "h100",
    "qwen3_5_4b_one_gpu": "h100", "qwen3_5_9b_lora_one_gpu": "h100", "qwen3_5_9b": "h100",
}  # fmt: skip
"""Examples for models that people train, and the GPU that each is written for."""


def new_run(path: Path) -> RunDir:
    """The directory of a run that nobody works on."""
    path.mkdir(parents=True, exist_ok=True)
    return RunDir(path.absolute())
