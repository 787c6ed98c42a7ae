from tests.rollout.tasks.environments.conftest import play

__all__ = ["play"]
