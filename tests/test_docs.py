"""The documentation: links lead to a file and a heading that exist, and README.md keeps to its
size.
"""

import doctest
import re

import pytest

from lightning_ring.cli.main import COMMANDS
from tests.processes import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
REFERENCE = sorted(ROOT.glob("docs/reference/*.md"))
SOURCES = sorted(
    path
    for folder in ("lightning_ring", "recipes", "benchmarks", "tests")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


def prose(page):
    """Text of ``page`` and of the file that it includes, without code."""
    included = r'^--8<-- "(.+\.md)"$'
    text = re.sub(
        included, lambda match: (ROOT / match[1]).read_text(), page.read_text(), flags=re.MULTILINE
    )
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Of the headings of ``page``, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "code", prose(page))):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_examples_of_the_reference_are_right(page):
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        example = doctest.DocTestParser().get_doctest(block, {}, page.name, str(page), 0)
        assert doctest.DocTestRunner().run(example).failed == 0


def test_pages_that_the_code_names_exist():
    named = {
        page
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text())
    }
    assert named
    assert {page for page in named if not (ROOT / page).is_file()} == set()


def test_commands_that_pages_name_exist():
    named = {name for page in PAGES for name in re.findall(r"`lightning-ring (\w+)", prose(page))}
    assert set() < named <= set(COMMANDS)


def test_pages_keep_to_their_size():
    words = {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in PAGES}
    assert sum(words.values()) <= 32_000
    long = {page for page, count in words.items() if count > 1_800}
    assert long <= {"docs/performance.md"}


def test_readme_keeps_to_its_size():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 100] == []


def test_the_plain_loop_is_included():
    # in a block of plain "python" ruff formats the line of the include as if it were code
    assert (
        '\n--8<-- "docs/examples/plain_loop.py:loop"\n'
        in (ROOT / "docs" / "guides" / "loops.md").read_text()
    )
