from tests.rollout.tasks.environments.conftest import play, tokenizer

__all__ = ["play", "tokenizer"]
