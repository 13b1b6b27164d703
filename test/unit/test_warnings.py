"""Warnings about traffic that gains nothing from chunks and about pins that block others; normal traffic raises
none."""

import inspect
import logging
import random
import re
from pathlib import Path

import pytest
from test_chunk_lists import id_of
from test_pins import pin

from fakes.loop import A, B, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.scheduler import warnings
from sglang_lazy.scheduler.warnings import MANY_ALIKE, PATIENCE, PERIOD, WINDOW, Warnings

pytestmark = pytest.mark.usefixtures("sglang_context")

QUESTION = (TEXT, (15, 14, 13))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Watched(Loop):
    """A loop that collects the warnings logged."""

    def __init__(self, caplog, pool_size=4000, **options):
        super().__init__(pool_size, chunked_prefill_size=1024, context_len=4096, **options)
        caplog.set_level(logging.WARNING, "sglang_lazy")  # SGLang's engines set the level of all
        self.clock_of_warnings, self.log_of_all = Clock(), caplog
        self.admission.warnings = Warnings(self.store.counts, self.clock_of_warnings)

    def ask(self, *chunks, **options):
        self.submit([*((CHUNK, tokens) for tokens in chunks), QUESTION], "r", max_new_tokens=1, **options)
        self.run()

    @property
    def warnings(self):
        records = [record for record in self.log_of_all.records if record.name.endswith("scheduler.warnings")]
        assert all(record.levelno == logging.WARNING for record in records)
        return [record.getMessage() for record in records]


@pytest.fixture
def dice(request):
    return random.Random(request.node.name)


def draw(dice, length):
    return tuple(dice.randrange(16) for _ in range(length))


def serve(loop, chunks):
    """Serve these chunks in prompts of eight."""
    chunks = list(chunks)
    for i in range(0, len(chunks), 8):
        loop.ask(*chunks[i : i + 8])


def test_chunks_that_never_recur(caplog, dice):
    loop = Watched(caplog, pool_size=200)
    fresh = (draw(dice, 12) for _ in range(4 * WINDOW))
    serve(loop, (next(fresh) for _ in range(WINDOW - 8)))
    assert not loop.warnings
    serve(loop, (next(fresh) for _ in range(WINDOW)))
    (warning,) = loop.warnings
    assert f"{WINDOW} chunks were computed while prompts found 0 cached" in warning
    loop.clock_of_warnings.now = PERIOD
    serve(loop, (next(fresh) for _ in range(WINDOW)))
    assert len(loop.warnings) == 2, "repeated, but at most once per period"


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.8], ids=["uniform", "zipf"])
def test_no_warning_for_a_corpus_far_larger_than_the_cache(caplog, dice, exponent):
    """Hits are rare but real: one in twenty of 2,000 documents is cached."""
    documents = [draw(dice, 12) for _ in range(2000)]
    weights = [rank**-exponent for rank in range(1, 2001)]
    loop = Watched(caplog, pool_size=1200)
    serve(loop, dice.choices(documents, weights, k=1600))
    counts = loop.store.counts
    assert counts.num_references - counts.num_hits > WINDOW
    assert not loop.warnings


@pytest.mark.slow
def test_no_warning_for_chunks_registered_ahead_of_use(caplog, dice):
    """Thousands of chunks without a hit yet, whether they resemble one another or not."""
    loop = Watched(caplog, pool_size=200)
    same = draw(dice, 80)
    for number in range(WINDOW + 8):
        tokens = draw(dice, 12) if number % 10 else (*draw(dice, 4), *same)
        loop.submit([(CHUNK, tokens), (TEXT, tokens[-1:])], "r", max_new_tokens=1)
        loop.run()
    assert not loop.warnings


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_template_with_a_changing_word(caplog, dice, place):
    """One word that differs from prompt to prompt within the same text, at any place and of any length."""
    loop = Watched(caplog)
    text = draw(dice, 200)
    cut = int(place * len(text))
    serve(loop, ((*text[:cut], *draw(dice, dice.randint(1, 12)), *text[cut:]) for _ in range(3 * MANY_ALIKE)))
    (warning,) = loop.warnings
    assert f"{MANY_ALIKE} chunks share" in warning
    assert ("first" if place > 0.5 else "last" if place < 0.5 else "") in warning


@pytest.mark.slow
def test_no_warning_for_texts_that_partly_agree(caplog, dice):
    """Texts that share a header and a footer; tenants with the same document; short texts."""
    loop = Watched(caplog)
    header, footer = draw(dice, 60), draw(dice, 60)
    serve(loop, ((*header, *draw(dice, 200 + i % 30), *footer) for i in range(4 * MANY_ALIKE)))
    for tenant in range(2 * MANY_ALIKE):
        loop.ask(footer + header, cache_salt=f"tenant-{tenant}")
    serve(loop, ((*header[:50], *draw(dice, 5)) for _ in range(2 * MANY_ALIKE)))
    assert not loop.warnings


@pytest.fixture
def crowded(caplog):
    """A pool of 40 slots, 8 of them pinned and most others held by a request that keeps running."""
    loop = Watched(caplog, pool_size=40)
    loop.warm(A, B)
    assert pin(loop, A, B)[0] == [id_of(A), id_of(B)]
    loop.submit([(TEXT, (7,) * 12)], "long", max_new_tokens=14)
    loop.step()
    return loop


def test_pins_that_block_a_prompt(crowded):
    crowded.submit([(CHUNK, (1, 1, 1, 1)), QUESTION], "waits", max_new_tokens=1)
    crowded.step()
    crowded.clock_of_warnings.now = PATIENCE - 0.1
    crowded.step()
    assert not crowded.warnings
    crowded.clock_of_warnings.now = PATIENCE
    for _ in range(2):
        crowded.step()
        assert [req.rid for req in crowded.waiting_queue] == ["waits"]
    (warning,) = crowded.warnings
    assert "8 are pinned" in warning
    crowded.run()


@pytest.mark.parametrize("length", [4, 20])
def test_no_warning_for_a_prompt_that_pins_do_not_block(crowded, length):
    """It waits only briefly, or needs more memory than the pins hold."""
    crowded.submit([(CHUNK, (1,) * length), QUESTION], "waits", max_new_tokens=1)
    for _ in range(6):
        crowded.step()
        crowded.clock_of_warnings.now += PATIENCE if length == 20 else PATIENCE / 10
    assert [req.rid for req in crowded.waiting_queue] == ["waits"]
    crowded.run()
    assert not crowded.warnings


def test_no_warning_for_prompts_that_wait_in_turn(crowded):
    """Each waits for less than the threshold, all together for longer."""
    for i in range(6):
        req = crowded.submit([(CHUNK, (1, 1, 1, i)), QUESTION], f"waits-{i}", max_new_tokens=1)
        crowded.step()
        crowded.clock_of_warnings.now += PATIENCE - 1
        crowded.step()
        crowded.abort(req)
    crowded.run()
    assert not crowded.warnings


def test_the_page_quotes_the_warnings():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8").partition("## Warnings")[2]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", page)]
    assert numbers == [PERIOD // 60, WINDOW, warnings.FEW_HITS, MANY_ALIKE, WINDOW, PATIENCE, warnings.MIN_LEN]
    source = re.sub(r'"\n\s*"', "", inspect.getsource(warnings))
    messages = re.findall(r"^\| `(.*?)`", page, re.M)
    assert len(messages) == 3
    for message in messages:
        assert re.search(r"%\w".join(map(re.escape, message.removesuffix("…").split("…"))), source), message
