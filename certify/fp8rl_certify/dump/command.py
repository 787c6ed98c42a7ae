"""Certifies the dump that a user names, and writes its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from fp8rl.models.hub import model_directory
from fp8rl.numerics.core.files import check_page, writing
from fp8rl.numerics.core.reading import check_path
from fp8rl_certify.dump import certify_dump
from fp8rl_certify.dump.dump_report import rendered, write_page
from fp8rl_certify.dump.rows import Sampling


def certify_file(
    dump: Path,
    model: str | None,
    sampling: Mapping[str, Any],
    preset: str,
    tokens: int,
    page: Path | None,
    say: Callable[[str], None],
) -> tuple[str, RenderableType, bool]:
    """Certify a dump, write its page, and return its JSON, its text and whether all is well.

    sampling: settings for rows without settings of their own; None: the dump's settings.
    """
    check_path(dump, "DUMP")
    page = page or (dump / "certify.html" if dump.is_dir() else dump.with_suffix(".certify.html"))
    check_page(page, "--page")
    weights = None if model is None else model_directory(model, None, "--model")
    settings = partial(Sampling.replaced, **sampling)
    report = certify_dump(dump, weights, sampling=settings, preset=preset, budget=tokens, say=say)
    with writing(page, "--page"):
        write_page(report, page)
    say(f"page     {page}")
    return report.to_json(), rendered(report), report.ok
