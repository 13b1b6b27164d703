"""`/lazy` in a browser: what people see of their chunks while they use them."""

import re
import time

import pytest
import requests
from http_prompts import chunk, generate, text
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

RIVERS = "Two rivers meet below the mill, and barges wait there for high water."
ORCHARD = "The orchard behind the chapel was planted in 1902 and bears pears to this day."
SALT = "page"
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const drawn = (...colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = node => node ? [...behind(node.parentElement), getComputedStyle(node).backgroundColor] : ["white"];
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility() || node.closest("option, script, style")) continue;
    const colour = getComputedStyle(node)[node.namespaceURI.endsWith("svg") ? "fill" : "color"];
    const [a, b] = [drawn(...behind(node)), drawn(...behind(node), colour)].map(luminance);
    found.push([texts.currentNode.data.trim(), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]);
  }
  return found;
}"""


def ask(url, *documents):
    segments = [
        text("Read: "),
        *[part for document in documents for part in (chunk(document), text(" "))],
        text("Why?"),
    ]
    return generate(url, segments=segments, cache_salt=SALT)["meta_info"]["chunks"]


def patch(url, name, pin):
    answer = requests.patch(f"{url}/chunks/{name}", json={"pin": pin}, headers={"X-Cache-Salt": SALT}, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def shown(browser, server):
    """The page; an error in the browser fails the test."""
    page, errors = browser.new_page(), []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{server}/lazy")
    expect(page.locator("#numbers")).to_be_visible()
    page.get_by_role("textbox", name="Tenant").fill(SALT)
    page.get_by_role("textbox", name="Tenant").press("Enter")
    yield page
    page.close()
    assert not [
        error for error in errors if "404" not in error
    ]  # of a chunk that is not cached, browsers log the status


def fact(page, name):
    return page.locator("#facts dl div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def test_the_page_shows_what_prompts_use(server, shown):
    expect(shown.locator("#prompts")).to_have_text("No prompt has used chunks yet.")
    expect(shown.locator("#n-chunks")).to_have_text("0")
    rivers, orchard = ask(server, RIVERS, ORCHARD)
    assert ask(server, ORCHARD, RIVERS)[0]["hit"]
    expect(shown.locator("#n-chunks")).to_have_text("2")
    expect(shown.locator("#n-rate")).to_have_text("50%")
    expect(shown.locator("#n-references")).to_have_text("2 of 4 chunks in 2 prompts")
    tokens = rivers["tokens"] + orchard["tokens"]
    assert tokens < 80, "shares of 1% or more have no decimals"
    expect(shown.locator("#n-tokens")).to_have_text(f"{tokens} tokens")
    expect(shown.locator("#n-reused")).to_have_text(f"{tokens}")
    evictable = shown.locator("#memory tr").filter(has_text="evictable").locator("td")
    expect(evictable).to_have_text(["2", f"{tokens}", f"{100 * tokens / 8000:.1f}%"])
    rates = re.compile("^Hit rate: 50% in the last hour")
    expect(shown.locator("#history svg")).to_have_attribute("aria-label", rates)
    strips = shown.locator("#prompts .strip")
    blocks = [strips.nth(row).locator("button") for row in (0, 1)]
    drawn = [[(b.get_attribute("data-chunk"), b.get_attribute("class")) for b in row.all()] for row in blocks]
    first, second = rivers["id"], orchard["id"]
    assert drawn == [[(second, "hit"), (first, "hit")], [(first, "miss"), (second, "miss")]]
    assert blocks[0].nth(1).evaluate("b => b.style.background") == blocks[1].nth(0).evaluate("b => b.style.background")

    shown.locator("#hottest").get_by_role("button").first.click()
    dialog = shown.get_by_role("dialog")
    expect(dialog).to_be_visible()
    opened = shown.locator("#chunk-id").inner_text()
    assert opened in (first, second)
    length = rivers["tokens"] if opened == first else orchard["tokens"]
    for name, value in {"tokens": length, "state": "resident", "hits": 1, "pinned": "no", "tenant": SALT}.items():
        expect(fact(shown, name)).to_have_text(str(value))
    expect(shown.locator("#graph circle")).to_have_count(2)
    expect(shown.locator("#graph .edge")).to_have_count(4)
    expect(shown.locator("#graph .miss")).to_have_count(2)
    other = first if opened == second else second
    expect(shown.locator("#graph a")).to_have_text(f"{other[:8]}… in 2")

    assert shown.url.endswith(f"/lazy#{opened}/{SALT}")
    shown.reload()
    expect(shown.locator("#chunk-id")).to_have_text(opened)
    expect(fact(shown, "tenant")).to_have_text(SALT)
    expect(shown.locator("#graph circle")).to_have_count(2)
    shown.keyboard.press("Escape")
    shown.get_by_role("textbox", name="Tenant").fill(SALT)
    shown.get_by_role("textbox", name="Tenant").press("Enter")
    shown.locator("#hottest").locator(f"[data-chunk='{opened}']").click()

    patch(server, opened, True)
    expect(fact(shown, "pinned")).to_have_text("until it is ended")
    expect(shown.locator("#pinned button")).to_have_attribute("title", opened)
    patch(server, opened, False)
    expect(fact(shown, "pinned")).to_have_text("no")
    expect(shown.locator("#pinned")).to_have_text("None.")

    shown.locator("#graph a").click()
    expect(shown.locator("#chunk-id")).to_have_text(other)
    shown.keyboard.press("Escape")
    expect(dialog).to_be_hidden()

    shown.get_by_role("textbox", name="Tenant").fill("nobody else")
    shown.get_by_role("textbox", name="Tenant").press("Enter")
    expect(shown.locator("#n-chunks")).to_have_text("0")
    expect(shown.locator("#prompts")).to_have_text("No prompt has used chunks yet.")


def test_chunks_are_pinned_and_deleted_on_the_page(server, shown):
    (used,) = ask(server, RIVERS)
    shown.evaluate("name => goTo(address(name, 'page'))", used["id"])
    expect(shown).to_have_title(f"{used['id'][:8]}… · sglang-lazy")
    said, pin, unpin = shown.locator("#acted"), shown.locator("#pin"), shown.locator("#unpin")
    expect(fact(shown, "pinned")).to_have_text("no")
    expect(unpin).to_be_hidden()
    pin.click()
    expect(said).to_have_text("It is pinned.")
    expect(fact(shown, "pinned")).to_have_text("until it is ended")
    shown.locator("#ttl").select_option("for an hour")
    pin.click()
    expect(fact(shown, "pinned")).to_have_text(re.compile("^until [0-9]"))
    (chunk_now,) = requests.get(f"{server}/chunks/{used['id']}?cache_salt={SALT}", timeout=60).json()["chunks"]
    assert chunk_now["pinned"] and 3500 < chunk_now["pinned_until"] - time.time() <= 3600
    unpin.click()
    expect(said).to_have_text("Its pin has ended.")
    expect(fact(shown, "pinned")).to_have_text("no")

    shown.once("dialog", lambda question: question.dismiss())
    shown.locator("#delete").click()
    assert requests.get(f"{server}/chunks/{used['id']}?cache_salt={SALT}", timeout=60).json()["chunks"]
    shown.on("dialog", lambda question: question.accept())
    shown.locator("#delete").click()
    expect(said).to_have_text("It is deleted.")
    expect(shown.locator("#facts")).to_have_text("It is not cached.")
    expect(shown.locator("#acts")).to_be_hidden()
    assert ask(server, RIVERS)[0]["hit"] is False
    expect(fact(shown, "state")).to_have_text("resident")
    requests.delete(f"{server}/chunks/{used['id']}?cache_salt={SALT}", timeout=60)
    shown.evaluate("act('PATCH', {pin: true})")  # as a click that comes just after somebody else's deletion
    expect(said).to_have_text(f"It did not work: chunk {used['id']} is unknown, or not cached")


def test_why_a_chunk_was_not_cached(server, shown):
    """From the list of prompts, by the id of a request, and by address; other tenants know no such request."""
    salt, prompt = "why", [text("Read: "), chunk(ORCHARD), text(" Why?")]
    (before,) = generate(server, segments=prompt, cache_salt=salt)["meta_info"]["chunks"]
    prompt = [
        text("Read: "),
        chunk(ORCHARD),
        chunk(f"{ORCHARD}\n"),
        chunk(ORCHARD.replace("1902", "1731")),
        text(" Why?"),
    ]
    rid = generate(server, segments=prompt, cache_salt=salt, sampling_params={"n": 1})["meta_info"]["id"]
    found = requests.get(f"{server}/lazy/why?rid={rid}&cache_salt={salt}", timeout=60).json()
    assert [chunk.get("reason") for chunk in found["chunks"]] == [None, "white space", "numbers"]
    assert [chunk["like"] for chunk in found["chunks"][1:]] == 2 * [{"id": before["id"]}]
    assert requests.get(f"{server}/lazy/why?rid={rid}&cache_salt={SALT}", timeout=60).status_code == 404

    shown.get_by_role("textbox", name="Tenant").fill(salt)
    shown.get_by_role("textbox", name="Tenant").press("Enter")
    shown.locator("#prompts .found").filter(has_text="1 of 3").click()
    expect(shown.get_by_role("dialog")).to_be_visible()
    expect(shown.locator("#why-rid")).to_have_text(rid)
    expect(shown.locator("#why-prompt")).to_contain_text("2 of 3 chunks not cached. Policy block")
    words = shown.locator("#why-chunks p")
    same = f"Chunk {before['id']} was used before, and has the same text but for"
    expect(words).to_have_text(["It was cached.", f"{same} white space at its ends.", f"{same} numbers or dates."])
    assert shown.url.endswith(f"/lazy#why/{rid}/{salt}")
    shown.reload()
    expect(words).to_have_count(3)
    shown.locator("#why-chunks li").nth(1).get_by_role("button").last.click()
    expect(shown.locator("#chunk-id")).to_have_text(before["id"])
    expect(shown.locator("#why-chunks")).to_be_hidden()
    expect(fact(shown, "tenant")).to_have_text(salt)
    shown.keyboard.press("Escape")
    expect(shown.get_by_role("dialog")).to_be_hidden()
    expect(shown).not_to_have_url(re.compile("#"))  # it changes after the dialog has gone
    shown.locator("#rid").fill("no such request")
    shown.locator("#rid").press("Enter")
    expect(shown.locator("#why-prompt")).to_have_text(
        "none of the last prompts with chunks has the request id 'no such request'"
    )


def test_the_page_works_from_the_keyboard(server, shown):
    for _ in range(2):  # chunks without hits are in no list
        (listed,) = ask(server, RIVERS)
    expect(shown.locator("#hottest button").first).to_be_visible()
    for block, keys in (
        (shown.locator("#prompts .strip button").first, "Enter"),
        (shown.locator("#hottest button").first, "Space"),
    ):
        block.focus()
        shown.keyboard.press(keys)
        expect(shown.get_by_role("dialog")).to_be_visible()
        shown.keyboard.press("Escape")
        expect(shown.get_by_role("dialog")).to_be_hidden()
    shown.get_by_role("textbox", name="Chunk").fill(listed["id"])
    shown.keyboard.press("Enter")
    expect(shown.locator("#chunk-id")).to_have_text(listed["id"])
    shown.keyboard.press("Escape")
    shown.locator("#list button").press("Enter")
    rows = shown.locator("#listed tbody tr")
    expect(rows.first).to_be_visible()
    in_list = requests.get(f"{server}/chunks", headers={"X-Cache-Salt": SALT}, timeout=60).json()["chunks"]
    assert [row.get_by_role("button").get_attribute("title") for row in rows.all()] == [one["id"] for one in in_list]
    shown.locator("#pause").press("Enter")
    expect(shown.locator("#status")).to_have_text("paused")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable(server, shown, scheme):
    """On a phone and on a large screen, with WCAG's contrast of 4.5 for text."""
    ask(server, RIVERS)
    shown.emulate_media(color_scheme=scheme)
    shown.locator("#list button").click()
    expect(shown.locator("#listed tbody tr").first).to_be_visible()
    for width in (360, 1300):
        shown.set_viewport_size({"width": width, "height": 800})
        contrasts = shown.evaluate(CONTRASTS)
        assert len(contrasts) > 50 and [low for low in contrasts if low[1] < 4.5] == []
        assert shown.evaluate("document.scrollingElement.scrollWidth") <= width
    shown.locator("#hottest button").first.click()
    expect(shown.locator("#graph svg")).to_be_visible()
    assert [low for low in shown.evaluate(CONTRASTS) if low[1] < 4.5] == []
