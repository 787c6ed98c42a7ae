"""Pages of the site that lie outside docs/, and links that lead out of it.

README.md is the site's first page. A link to a file that is no page of the site becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Each page by its place in the repository, and what the site calls it."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for place, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with its links as the site has them."""
    name = page.file.src_uri
    place = {site: outside for outside, site in OUTSIDE.items()}.get(name, f"docs/{name}")
    return _LINK.sub(lambda link: _resolved(*link.groups(), folder=posixpath.dirname(place), name=name), markdown)


def _resolved(image: str, text: str, target: str, *, folder: str, name: str) -> str:
    path, mark, anchor = target.partition("#")
    if "://" in target or not path:
        return f"{image}[{text}]({target})"
    place = posixpath.normpath(posixpath.join(folder, path))
    if not (ROOT / place).exists():  # mkdocs says so
        return f"{image}[{text}]({target})"
    if place in OUTSIDE:
        site = OUTSIDE[place]
    elif place.startswith("docs/"):
        site = place.removeprefix("docs/")
    else:
        return text
    return f"{image}[{text}]({posixpath.relpath(site, posixpath.dirname(name) or '.')}{mark}{anchor})"
