"""A reward of one's own: half a point more for each intermediate result of a chain that the answer shows."""


def shows_its_work(answer: str, question: str) -> dict[str, float]:
    chain, _, _ = answer.partition("\n")
    shown = [part for part in chain.split(",") if part.lstrip("-").isdigit()]
    return {"shown": 0.5 * len(shown) / max(1, question.count("+") + question.count("-"))}
