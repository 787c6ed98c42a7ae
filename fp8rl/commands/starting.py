"""Commands for one's own experiments: init, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8rl.commands.shared import show, user_errors
from numerics.errors import user_error


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a first experiment that runs as it is: a spec, a reward, problems, a tiny model, and what to change."""
    with user_errors():
        from fp8rl.starting import write_start

        for path in write_start(folder):
            show(str(path), soft_wrap=True)
        show(f"\ncd {folder} && fp8rl train spec.yaml", soft_wrap=True)


def runs(
    names: Annotated[list[str] | None, typer.Argument(metavar="[A B]", help="Two runs to compare.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where the runs are.")] = Path("runs"),
    page: Annotated[Path | None, typer.Option("--page", help="Write an HTML page of it too.")] = None,
) -> None:
    """List the runs of a folder, or compare two: where their specs differ, and their metrics at the end."""
    with user_errors():
        from fp8rl.comparing import listed, metrics_compared, runs_in, specs_compared
        from fp8rl.run import Run
        from rl.record.console import PlainConsole

        if names and len(names) != 2:
            raise user_error("runs", found=f"{len(names)} names", expected="none or two", remedy="Name two runs.")
        if names:
            one, other = (Run(Path(name) if Path(name).is_dir() else folder / name) for name in names)
            tables = [specs_compared(one, other), metrics_compared(one, other)]
        else:
            tables = [listed(runs_in(folder))]
        for table in tables:
            show(table)
        if page is not None:
            import io

            console = PlainConsole(record=True, file=io.StringIO(), width=160)
            console.print(*tables)
            console.save_html(str(page))
            show(str(page), soft_wrap=True)
