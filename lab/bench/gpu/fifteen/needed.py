"""What of the tracked tree travels with a call for nothing."""

NOT_NEEDED = (
    *("docs/studies", "docs/results", "docs/images", "docs/studies.md", "lab/docs", "examples/data/*_sft.jsonl"),
    *(f"examples/models/tiny_{name}" for name in ("qwen2", "glm", "olmoe", "qwen3_moe_init", "qwen3_next")),
)
"""Tracked files that neither call reads."""
