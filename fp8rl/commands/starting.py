"""Commands for one's own experiments: init, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands import complete
from fp8rl.commands.shared import show, user_errors
from fp8rl.numerics.errors import user_error


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a first experiment that runs as it is: a spec, a reward, problems, a tiny model, and what to change."""
    with user_errors():
        from fp8rl.starting import write_start

        for path in write_start(folder):
            show(str(path), soft_wrap=True)
        show(f"\ncd {folder} && fp8rl train spec.yaml", soft_wrap=True)


def runs(
    one: Annotated[
        str | None, typer.Argument(metavar="A", help="A run, by name or path.", autocompletion=complete.run_names)
    ] = None,
    other: Annotated[
        str | None, typer.Argument(metavar="B", help="The run to compare it with.", autocompletion=complete.run_names)
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where the runs are.")] = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="Compare equal metrics too.")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="Write an HTML page of it too, with the curves over each other.")
    ] = None,
) -> None:
    """List the runs of a folder, or compare two: where their specs and their metrics at the end differ."""
    with user_errors():
        from fp8rl.comparing import listed, metrics_compared, runs_in, specs_compared, write_comparison
        from fp8rl.numerics.io.files import check_page, writing
        from fp8rl.numerics.io.reading import check_path
        from fp8rl.run import Run

        check_path(folder, "--dir")
        for name in filter(None, (one, other)):
            check_path(name, "runs")
        if page is not None:
            check_page(page, "--page")
        if one is not None:
            if other is None:
                raise user_error("runs", found="one name", expected="none or two", remedy=f"Write fp8rl runs {one} B.")
            found = [Run(Path(name) if Path(name).is_dir() else folder / name) for name in (one, other)]
            tables = [specs_compared(*found), metrics_compared(*found, every=every)]
        else:
            found = runs_in(folder)
            tables = [listed(found)]
        for table in tables:
            show(table.rendered())
        if page is not None:
            with writing(page, "--page"):
                write_comparison(page, found, tables)
            show(str(page), soft_wrap=True)
