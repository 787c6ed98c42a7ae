"""The reward of an answer: 1 if it ends with the reference, else 0."""


def right(answer: str, reference: str) -> float:
    return 1.0 if answer.endswith(reference) else 0.0
