"""The documentation says what the code says: settings, metrics, events, environment names, rules, links, snippets."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from lightning_cann import environment
from lightning_cann.metrics import EVENTS, METRICS
from lightning_cann.settings import FaultToleranceSettings
from lightning_cann.strategies.fault_tolerant import FaultTolerantMixin

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def section(title: str, text: str = README) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no section {title!r}"
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of all table rows whose first cell is one code word."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and re.fullmatch(r"`[^`]+`", cells[0]):
            found[cells[0].strip("`")] = cells[1:]
    return found


def test_every_setting_is_there_with_its_default() -> None:
    told = {name: cells[0].strip("`") for name, cells in rows(section("Settings")).items() if name.islower()}
    fields = dataclasses.fields(FaultToleranceSettings)
    assert told == {f.name: repr(f.default).replace("'", '"') for f in fields}


def test_the_strategy_takes_every_setting_with_the_same_default() -> None:
    parameters = inspect.signature(FaultTolerantMixin.__init__).parameters
    for field in dataclasses.fields(FaultToleranceSettings):
        assert parameters[field.name].default == field.default, field.name
        assert f"{field.name}:" in (FaultTolerantMixin.__doc__ or ""), field.name


def test_every_metric_is_there_with_its_unit() -> None:
    assert {name: cells[0] for name, cells in rows(section("Metrics")).items()} == {m.name: m.unit for m in METRICS}


def test_every_event_is_there_with_its_fields() -> None:
    told = {name: tuple(re.findall(r"`(\w+)`", cells[0])) for name, cells in rows(section("Events")).items()}
    assert told == {e.name: e.fields for e in EVENTS}


def test_every_environment_name_of_users_is_there() -> None:
    told = {name for name in rows(section("Settings")) if name.startswith("HCCL_FT_")}
    assert told == set(environment.USER_NAMES)


def test_every_rule_has_its_tests_named() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`(test_r\d+_\w+)`", architecture))
    code = (ROOT / "tests" / "membership" / "test_rules.py").read_text()
    assert named == set(re.findall(r"^def (test_r\d+_\w+)", code, re.MULTILINE))
    assert {re.findall(r"\d+", name)[0] for name in named} == {str(n) for n in range(1, 11)}


@BY_NAME
def test_python_snippets_compile_and_use_real_arguments(page: Path) -> None:
    accepted = set(inspect.signature(FaultTolerantMixin.__init__).parameters)
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "FaultTolerantStrategy":
                assert {keyword.arg for keyword in node.keywords} <= accepted


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@BY_NAME
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        if fragment:
            assert fragment in {anchor(h) for h in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)}, target


@BY_NAME
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in code marks, from the root of the repository or of the package; and ``python -m`` modules."""
    text = page.read_text()
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text)
    named += [path for command in re.findall(r"`pytest ([^`]+)`", text) for path in command.split()]
    named += [module.replace(".", "/") + ".py" for module in re.findall(r"python -m (benchmarks\.\w+)", text)]
    for path in named:
        if not path.startswith(("runs/", "<")):
            assert any((root / path).exists() for root in (ROOT, ROOT / "lightning_cann")), path
