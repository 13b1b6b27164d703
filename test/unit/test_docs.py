"""The pages: links and anchors resolve, lengths stay within limits, and the example policy works."""

import argparse
import inspect
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import prometheus_client
import pytest
from sglang.srt.environ import envs
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from sglang_lazy.chunks.counts import Counts
from sglang_lazy.chunks.metrics import ChunkMetrics
from sglang_lazy.core.config import add_cli_args
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.port.cache import create, storage
from sglang_lazy.serving import shadow

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "research", "sgl-kernel-lazy")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
    ]
)
MAX_WORDS = {"README.md": 1050, "docs/design.md": 2500, "docs/operations.md": 1750}

FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}.*)?\n)+")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return INDENTED.sub("\n", FENCED.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """The targets of a page's relative links."""
    targets = LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> Iterator[str]:
    """The anchors that GitHub gives to a page's headings."""
    seen: dict[str, int] = {}
    for heading in HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield f"{slug}-{count}" if count else slug


def broken(page: Path) -> list[str]:
    """The relative links of a page that do not resolve."""
    found = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    assert broken(page) == []


@pytest.mark.parametrize("page", MAX_WORDS)
def test_pages_are_short(page):
    """As `wc -w` counts: code, diagrams and table borders, too."""
    assert len((ROOT / page).read_text(encoding="utf-8").split()) < MAX_WORDS[page]


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[tuple[float, int]]:
    """The numbers in a text, each with how many decimals it has."""
    found = [number.replace(",", "") for number in NUMBER.findall(text)]
    return [(float(number), len(number.partition(".")[2])) for number in found]


def section(page: Path, anchor: str) -> str:
    """What stands under a heading, or all of a page."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    if not anchor:
        return text
    headings = list(HEADING.finditer(text))
    starts = dict(zip(anchors(page), headings, strict=True))
    level = starts[anchor].group().count("#")
    ends = [h.start() for h in headings if h.start() > starts[anchor].start() and h.group().count("#") <= level]
    return text[starts[anchor].start() : min(ends, default=len(text))]


def rows_of_figures(page: Path) -> list[tuple[str, str]]:
    """The figures of a summary's tables, each with the page it is from: the link in the cell before or after it."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split("|")
        linked = [index for index, cell in enumerate(cells) if "results/" in cell or "README.md" in cell]
        if len(cells) > 1 and linked and (link := LINK.search(cells[linked[0]])):
            figures = cells[linked[0] + 1] if linked[0] + 1 < len(cells) else cells[linked[0] - 1]
            if NUMBER.search(figures):
                found.append((figures.strip(), link.group(1)))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/results/README.md"])
def test_summaries_repeat_what_results_have(page):
    """Each number of a summary is one on the page that it names, or one there rounds to it."""
    rows = rows_of_figures(ROOT / page)
    assert len(rows) > 5
    stale = []
    for figures, link in rows:
        path, _, anchor = link.partition("#")
        known = [number for number, _ in numbers(section((ROOT / page).parent / path, anchor))]
        for number, decimals in numbers(figures):
            if not any(round(other, decimals) == number for other in known):
                stale.append((figures, number))
    assert stale == []


def named_tests(page: Path) -> set[str]:
    """The tests that a page names."""
    return set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))


def test_every_test_that_a_page_names_exists():
    modules = [*(ROOT / "test").rglob("test_*.py"), *(ROOT / "research" / "test").glob("test_*.py")]
    there = {name for module in modules for name in re.findall(r"^def (test_\w+)", module.read_text(), re.MULTILINE)}
    assert named_tests(ROOT / "docs" / "operations.md")
    assert {name for page in PAGES for name in named_tests(page)} - there == set()


@pytest.fixture
def metrics(monkeypatch) -> set[str]:
    """The names of all metrics, ours and SGLang's."""
    names = set()

    def metric(name, *_args, **_options):
        names.add(name)
        return MagicMock()

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, metric)
    ChunkMetrics(MagicMock(counts=Counts()), {})
    create.measured_host(MagicMock(labels={}))
    storage.measured_storage(1, 0, {})
    shadow.measured_shadow(MagicMock(), 1.0, 0.0, {})
    return names | set(re.findall(r'"(sglang:\w+)"', inspect.getsource(metrics_collector)))


def test_all_that_operators_are_told_to_set_and_watch_exists(metrics):
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    add_cli_args(parser)
    for pattern, known in {
        r"--[a-z][a-z0-9-]*": parser._option_string_actions.keys(),
        r"sglang(?:_lazy)?:\w+": metrics,
        r"SGLANG_\w+": vars(type(envs)).keys(),
    }.items():
        named = set(re.findall(pattern, page))
        assert named and named <= known, named - known


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `plan`, twice\n\n## Twice: [linked](here)\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text("""# Here
[a](other.md) [b](#here) [c](other.md#a-plan-twice) [d](other.md#twice-1) [e](https://nowhere.invalid) `[f](code.md)`
[g](gone.md), [h](#gone) and ![i](other.md#twice-2)

    [j](indented.md)

[k](other.md#twice-linked)

```
[l](fenced.md)
# In code
```

[m](#in-code)
""")
    assert broken(page) == ["gone.md", "#gone", "other.md#twice-2", "#in-code"]


def test_the_policy_in_contributing_is_one():
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(source, names)
    ids = array("q", range(10, 20))
    layout = PromptLayout(((1, 5), (5, 6)))
    prompt = LinkedPrompt.build(ids, layout, names["LastTokens"]().kept(layout, ids), extra_key=None)
    assert [(chunk.start, chunk.kept) for chunk in prompt.chunks] == [(1, ((0, 3),))]
    assert [span.positions.tolist() for span in prompt.spans] == [[0], [4, 5, 6, 7, 8, 9]]
    assert str(names["LastTokens"](tokens=2)) == "last-tokens:tokens=2"
