"""The error for wrong input, in the same words as in `fp8rl`. Nothing here imports `fp8rl`, so that a server can be
certified without it."""


class UserError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2."""


def user_error(key: str, *, found: object, expected: str, remedy: str) -> UserError:
    """Return the error for `key`: `found` is the value found (strings are quoted), `remedy` an imperative sentence."""
    return UserError(f"{key}: found {shown(found)}, expected {expected}. {remedy}")


def shown(value: object, limit: int = 160) -> str:
    """Return `value` as a user would write it, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
