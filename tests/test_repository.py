"""What stands beside the code says what the code says: the site, the hooks, the citation, the launch templates."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.cli import COMMANDS
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAUNCH = sorted((ROOT / "launch").iterdir())


def test_the_site_has_every_page_with_a_title_by_word() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    sections: list[dict[str, list[dict[str, str]]]] = yaml.safe_load(text)["nav"]
    titles = {
        page: title
        for section in sections
        for pages in section.values()
        for entry in pages
        for title, page in entry.items()
    }
    listed = list(titles)
    assert (titles["plan.md"], titles["memory.md"], titles["gpu.md"]) == ("Plan", "Memory", "GPU")
    assignments = ast.parse((ROOT / "docs/hooks/pages.py").read_text()).body
    (outside,) = [ast.literal_eval(each.value) for each in assignments if _assigns(each, "OUTSIDE")]
    assert all((ROOT / place).is_file() for place in outside)
    assert sorted(listed) == sorted([*outside.values(), *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_a_commit_is_checked_by_what_lint_runs() -> None:
    hooks = [hook["entry"] for repo in _yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    dry = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    linted = [line.removesuffix(" .") for line in dry.splitlines() if re.match(r"\.venv/bin/(ruff|mypy)", line)]
    assert hooks == linted and len(hooks) == 3


def test_the_citation_is_of_this_version() -> None:
    citation = _yaml("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert f"({PROJECT['version']})" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_forms_are_whole(form: Path) -> None:
    read = yaml.safe_load(form.read_text())
    if form.stem != "config":
        assert read["name"] and read["description"]
        ids = [part["id"] for part in read["body"]]
        assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in read["body"])


@pytest.mark.parametrize("file", LAUNCH, ids=lambda path: path.name)
def test_launch_templates_name_what_there_is(file: Path) -> None:
    text = file.read_text()
    commands = {command.__name__ for group in COMMANDS.values() for command in group}
    assert set(re.findall(r"^ *(?:exec )?fp8rl (\w+)", text, re.MULTILINE)) <= commands
    named = re.findall(r"\b(?:launch|examples|docs)/[\w./]+\b", text)
    assert named and all((ROOT / name).is_file() for name in named)
    if file.suffix in {".sh", ".sbatch"}:
        assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
        assert file.stat().st_mode & 0o111


def test_kuberay_runs_the_ray_of_the_image() -> None:
    cluster = _yaml("launch/kuberay.yaml")["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "requirements/gpu.txt").read_text().splitlines()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(group["template"]["spec"]["containers"][0]["image"] == "fp8rl:latest" for group in groups)


def test_a_node_without_a_spec_says_what_it_needs() -> None:
    run = subprocess.run([ROOT / "launch/node.sh", "0", "1"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "expected at least 4: RANK NODES HEAD SPEC" in run.stderr


def _yaml(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return read


def _assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
