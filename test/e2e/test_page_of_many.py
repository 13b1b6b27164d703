"""The page `/lazy` in a browser, over 10 and over 10,000 chunks, half of them on the device: it shows what is there.

A scheduler without a model answers, as for the screenshots in docs/images.
"""

import io
import re
import time

import pytest
from PIL import Image
from playwright.sync_api import expect

from benchmark.scheduler.page import Served, page_of
from fakes.context import published
from sglang_lazy.chunks.reports import TOP
from sglang_lazy.core.keys import Namespace, chunk_id, tokens_digest

pytestmark = pytest.mark.slow  # it takes seconds to have so many
PATIENCE = 60_000
"""Milliseconds that a busy machine has for a survey of 10,000 chunks."""


@pytest.fixture(scope="module", params=[10, 10_000])
def served(request):
    with published():
        yield Served(request.param, 200)


@pytest.fixture
def shown(served, browser):
    """The page, which may ask no other server and log no error."""
    page, errors, asked = browser.new_page(viewport={"width": 1200, "height": 900}), [], []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    with page_of(served) as url:
        page.goto(url)
        expect(page.locator("#hottest button").first).to_be_visible(timeout=PATIENCE)
        yield page
        page.close()
    assert not errors and asked and all(address.startswith(url.removesuffix("/lazy")) for address in asked)


def best(chunks, number):
    """The lists of a survey: ids of the first chunks, without those that are equal to one that is left out."""
    values = sorted((number(chunk) for chunk in chunks), reverse=True)
    least = values[TOP] if len(values) > TOP else 0
    return {chunk_id(chunk.key.tokens) for chunk in chunks if number(chunk) > least}


def titles(page, name):
    return [button.get_attribute("title") for button in page.locator(f"#{name} button").all()]


def number_in(locator):
    return int(re.sub(r"\D", "", locator.inner_text()))


def test_numbers_and_lists_are_those_of_the_cache(served, shown):
    chunks = list(served.host.tree_cache.store.catalog)
    on_device = [chunk for chunk in chunks if chunk.node.slots is not None]
    expect(shown.locator("#n-chunks")).to_have_text(f"{len(chunks):,}")
    expect(shown.locator("#n-tokens")).to_have_text(f"{sum(chunk.num_tokens for chunk in chunks):,} tokens")
    rows = shown.locator("#memory tr")
    counted = {name: number_in(rows.filter(has_text=name).locator("td").first) for name in ("pinned", "in use")}
    counted |= {name: number_in(rows.filter(has_text=name).locator("td").first) for name in ("evictable", "here alone")}
    assert counted["pinned"] + counted["in use"] + counted["evictable"] >= len(on_device) >= counted["evictable"]
    assert counted["here alone"] == len(chunks) - len(on_device)
    for name, number in (("hottest", lambda chunk: chunk.hits), ("largest", lambda chunk: chunk.num_tokens)):
        found = titles(shown, name)
        assert len(found) == len(set(found)) == min(TOP, len(chunks)) and best(chunks, number) <= set(found)
    pinned = {chunk_id(chunk.key.tokens) for chunk in chunks if chunk.pin is not None}
    assert set(titles(shown, "pinned")) == pinned and pinned
    expect(shown.locator("#prompts .strip")).to_have_count(12)
    evicted = sum(row[1] for row in served.host.tree_cache.store.counts.evicted_lately.rows(None, False, time.time()))
    rates = re.compile(rf"^Hit rate: [\d.]+% in the last hour.* {evicted:,} chunks? evicted\.$" if evicted else "rate")
    assert bool(shown.locator("#history .evictions").count()) == bool(evicted)
    expect(shown.locator("#history svg")).to_have_attribute("aria-label", rates)


def test_one_click_from_a_chunk_to_what_uses_it(served, shown):
    button = shown.locator("#hottest button").first
    name = button.get_attribute("title")
    button.click()
    expect(shown.locator("#chunk-id")).to_have_text(name)
    prompts = served.frontend.usage.uses(None, False, name)["prompts"]
    expect(shown.locator("#graph circle")).to_have_count(len(prompts))
    assert prompts


def test_a_chunk_has_an_address(served, shown):
    """It survives a reload, and goes when the chunk is closed; two chunks have two."""
    seen = []
    for place in (0, 1):
        shown.locator("#hottest button").nth(place).evaluate("button => button.click()")
        expect(shown.locator("#graph svg")).to_be_visible()
        name = shown.locator("#chunk-id").inner_text()
        seen.append(shown.url)
        assert shown.url.endswith(f"#{name}")
        shown.reload()
        expect(shown.locator("#chunk-id")).to_have_text(name, timeout=PATIENCE)
        expect(shown.locator("#graph svg")).to_be_visible()
        shown.keyboard.press("Escape")
        expect(shown.get_by_role("dialog")).to_be_hidden()
        expect(shown.locator("#hottest button").first).to_be_visible()
        assert "#" not in shown.url
    assert len(set(seen)) == 2
    shown.goto(seen[0])
    expect(shown.locator("#chunk-id")).to_have_text(seen[0].partition("#")[2], timeout=PATIENCE)
    shown.goto(f"{seen[0].partition('#')[0]}#no-chunk")
    expect(shown.get_by_role("dialog")).to_be_hidden()


def test_shares_of_memory_add_up(shown):
    tables = shown.locator("#memory table")
    for table in tables.all():
        shares = [cell.removesuffix("%") for cell in table.locator("tbody td:last-child").all_inner_texts()]
        assert len(shares) > 2 and sum(float(share) for share in shares if share != "<0.1") == pytest.approx(100)
    assert tables.count() == 2


def test_names_of_policies_are_not_cut(served, shown):
    longest = "base:preamble=lead+query:ratio=0.15,static=0.05"
    chunks = [{"id": f"{number:016x}", "tokens": 100, "hit": True} for number in range(60)]
    served.frontend.usage.add(Namespace("chunk", None, None), longest, chunks, 100, time.time())
    name = shown.locator("#prompts").get_by_text(longest, exact=True)
    for width in (1280, 390):
        shown.set_viewport_size({"width": width, "height": 900})
        expect(name).to_be_visible(timeout=PATIENCE)
        assert name.evaluate("node => node.scrollWidth <= node.clientWidth && node.scrollHeight <= node.clientHeight")
        assert shown.evaluate("document.scrollingElement.scrollWidth") <= width


def test_colours_tell_chunks_apart(shown):
    """Of 3,000, less than 1% look like another one, and no colour is as good as like another."""
    names = [tokens_digest([number]).hex()[:16] for number in range(3000)]
    looks = shown.evaluate("names => names.map(name => swatch(name).style.background)", names)
    colours = {colour for look in looks for colour in re.findall(r"oklch\((?:[^()]|\([^()]*\))*\)", look)}
    assert len(set(looks)) > 0.99 * len(names) and len(colours) <= 72


def test_all_of_them_are_listed_by_pages(served, shown):
    chunks = sorted(served.host.tree_cache.store.catalog, key=lambda chunk: -chunk.num_tokens)
    shown.locator("#sort").select_option("tokens")
    shown.locator("#list button").click()
    rows, count = shown.locator("#listed tbody tr"), 0
    for _ in range(3):
        expect(rows.nth(count)).to_be_visible(timeout=PATIENCE)
        count = rows.count()
        if count == len(chunks):
            break
        shown.locator("#more").click()
    names = {chunk_id(chunk.key.tokens): chunk.num_tokens for chunk in chunks}
    listed = [names[button.get_attribute("title")] for button in rows.get_by_role("button").all()[:count]]
    assert listed == [chunk.num_tokens for chunk in chunks[:count]] and count == min(150, len(chunks))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_it(shown, scheme):
    """Nothing is cut off at the right, and there is something to see from top to bottom."""
    shown.emulate_media(color_scheme=scheme)
    assert shown.evaluate("document.scrollingElement.scrollWidth") <= 1200
    picture = Image.open(io.BytesIO(shown.screenshot(full_page=True))).convert("L")
    tops = range(0, picture.height - 100, 200)
    bands = [picture.crop((0, top, 1200, min(top + 200, picture.height))) for top in tops]
    assert picture.height > 1000 and all(len(band.getcolors()) > 20 for band in bands)
    assert (picture.getpixel((2, 2)) < 128) == (scheme == "dark")
