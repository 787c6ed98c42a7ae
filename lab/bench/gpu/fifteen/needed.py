"""What of the tracked tree travels with a call for nothing."""

NOT_NEEDED = (
    *("docs", "certify", "lab/docs", "examples/data/*_sft.jsonl"),
    *(f"examples/models/tiny_{name}" for name in ("qwen2", "glm", "olmoe", "qwen3_moe_init", "qwen3_next")),
    *(f"tests/{folder}" for folder in ("certify", "diagnose", "e2e", "examples", "fp8rl", "golden", "lab", "models")),
    *(f"tests/{folder}" for folder in ("rl", "rollout", "trainer", "weight_sync")),
)
"""Tracked files that neither call reads."""
