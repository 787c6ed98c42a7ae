"""What a model is there for in a run: one word for trainer, engines, protocol and manifest."""

from __future__ import annotations

from typing import Literal

Role = Literal["policy", "reference", "critic", "teacher", "draft"]
"""`policy`: it samples and learns. `reference`: it stays what the policy was, and says how far that has moved.
`critic`: it foresees rewards. `teacher`: another model that scores the policy's answers. `draft`: a small model that
proposes tokens for the policy; no code of today runs one."""
