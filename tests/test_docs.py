"""What the pages name is there: each path of the repository, each module, and each link to another page."""

import re
from pathlib import Path

import pytest

import fp8rl
from fp8rl.rl.experiment.validation import valid_keys
from tests.support.paths import ROOT

OWN = ("README.md", ".github/CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OWN), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("lab/docs/*.md"))]
FOLDERS = "lab fp8rl examples docs tests requirements"
PATH = re.compile(rf"(?:{'|'.join(FOLDERS.split())})/[\w./-]*")
MODULE = re.compile(rf"(?:{'|'.join(FOLDERS.split())})(?:\.\w+)+")


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem[:3] != "log"], ids=lambda page: page.name)
def test_every_path_and_module_that_a_page_names_is_there(page: Path) -> None:
    """A path in capitals, such as `studies/NAME`, is one to be made; the log speaks of the past."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`([^`\s]+)`", text)
    paths = [name for name in named if PATH.fullmatch(name) and not re.search(r"[A-Z]{3}|_N\b", name)]
    modules = [name for name in named if MODULE.fullmatch(name) and not name.endswith((".yaml", ".py", ".json"))]
    missing = [name for name in paths if not any((base / name).exists() for base in (ROOT, page.parent))]
    missing += [name for name in modules if not _is_module(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_link_leads_somewhere_and_every_anchor_is_a_heading(page: Path) -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    targets = [(page.parent / file if file else page, anchor) for file, _, anchor in links]
    assert not [str(target) for target, anchor in targets if not target.exists()]
    assert not [(str(target), anchor) for target, anchor in targets if anchor and anchor not in _anchors(target)]


def test_the_page_for_those_who_come_from_elsewhere_names_keys_that_there_are() -> None:
    rows = [
        line.split("|")[2] for line in (ROOT / "docs/coming_from.md").read_text().splitlines() if line.count("|") == 5
    ]
    named = [key for row in rows[2:] for key in re.findall(r"`([a-z_.]+)`", row) if "." in key and " " not in key]
    assert len(named) > 30 and not set(named) - set(valid_keys())


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them: words in lower case, joined by hyphens."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def _is_module(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    parts = name.split(".")
    if parts[0] == "fp8rl" and parts[1] in fp8rl.__all__:
        return True
    places = [ROOT.joinpath(*parts[:end]) for end in (len(parts), len(parts) - 1)]
    whole, above = ((place / "__init__.py").exists() or place.with_suffix(".py").exists() for place in places)
    return whole or (above and len(parts) > 2)
