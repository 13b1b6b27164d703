"""Why chunks were not cached: what prompts are told of the same chunk, or of one that is nearly the same."""

import asyncio
import random
from array import array

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fakes.server import FakeServer
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.remembered import deep_size
from sglang_lazy.serving import fingerprints, misses
from sglang_lazy.serving.fingerprints import ENDS, KEPT, NORMALIZATIONS, WINDOW, TokenTexts, fingerprint
from sglang_lazy.serving.misses import WORDS, Answered, Misses, Terms

LEASE = (
    "The tenant pays 1,200 pounds on the first day of each month, beginning on March 3, 2024, to the landlord's agent. "
    "Repairs of the roof, the gutters and the outer walls are the landlord's; those of locks, glass and taps are the "
    "tenant's, who also keeps the garden. Either may end the lease in writing with three months' notice.\n"
)
OTHER = (
    "Sourdough rises overnight in a cool larder, and is baked under a lid until the crust sings when tapped at last."
)
WRAPPED = f"<document index='7'>\n<source>lease.pdf</source>\n{LEASE}</document>\n"


@pytest.fixture(autouse=True)
def fixed_hashes(monkeypatch):
    """Which windows are kept is drawn by lot, each time that a server starts."""
    monkeypatch.setattr(fingerprints, "_SECRET", b"a secret")
    monkeypatch.setattr(
        fingerprints, "_FACTORS", np.random.default_rng(0).integers(1 << 63, size=8, dtype=np.uint64) | 1
    )


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level one, as most models have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([LEASE, OTHER] * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Server:
    """Answers prompts of one chunk, and asks why it was missing."""

    def __init__(self, tokenizer):
        self.tokenizer, self.misses, self.now = tokenizer, Misses(FakeServer(tokenizer=tokenizer)), 1000.0

    async def use(self, text, hit=False, tenant=None, terms=None, began=None, rid=None):
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        name = chunk_id(tokens_digest(array("q", ids)))
        self.now += 10
        report = [{"id": name, "offset": 2, "tokens": len(ids), "hit": hit}]
        began = self.now - 5 if began is None else began
        rid = rid or f"r{self.now}"
        self.misses.note(Answered(rid, tenant, terms or Terms(), [1, 2, *ids, 3], report, began, self.now))
        return name, (await self.misses.of(tenant, rid)).get(name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f" \n{LEASE.strip()}", "white space"),
        (LEASE.replace(". ", ".\n\n"), "spacing"),
        (LEASE.replace("The tenant", "the TENANT"), "case"),
        (LEASE.replace("March 3, 2024", "October 17, 2031").replace("1,200", "900"), "numbers"),
        (WRAPPED, "both ends"),
        (f"Read this with care, please, dear reader: {LEASE}", "beginning"),
        (f"{LEASE}Answer in one sentence only, and cite the page.", "end"),
        (LEASE.replace("the gutters and the outer walls", "chimneys"), "inside"),
        (OTHER, "new"),
        ("Tea.", "new"),
    ],
)
def test_a_chunk_that_is_nearly_the_same(tokenizer, text, reason):
    async def run():
        server = Server(tokenizer)
        _, first = await server.use("Barges wait below the mill for high water, two and two, all day long in spring.")
        before, second = await server.use(LEASE)
        assert (first.reason, second.reason) == ("new", "new")
        _, miss = await server.use(text)
        assert (miss.reason, miss.like) == (reason, None if reason == "new" else before)

    asyncio.run(run())


def test_boilerplate_does_not_hide_the_nearest_chunk(tokenizer):
    """Many chunks, all later, share a letterhead of half the text with the one that a template is put around."""

    async def run():
        server, rng = Server(tokenizer), random.Random(0)
        letters = [f"{LEASE}{' '.join(rng.sample(LEASE.split() + OTHER.split(), 60))}\n" for _ in range(20)]
        names = [(await server.use(letter))[0] for letter in letters]
        found = [(await server.use(f"<document>\n{letter}</document>\n"))[1] for letter in letters[:10]]
        assert [miss[:2] for miss in found] == [("both ends", name) for name in names[:10]]

    asyncio.run(run())


def test_the_same_chunk(tokenizer):
    async def run():
        server = Server(tokenizer)
        name, _ = await server.use(LEASE)
        assert (await server.use(LEASE, hit=True))[1] is None
        assert (await server.use(LEASE))[1].reason == "evicted"
        assert (await server.use(LEASE, terms=Terms("adapter")))[1].reason == "adapter"
        assert (await server.use(LEASE, terms=Terms("adapter")))[1].reason == "evicted"
        assert (await server.use(LEASE, terms=Terms(preamble="neutral")))[1].reason == "preamble"
        leads = [Terms.of(None, "lead", lead) for lead in ([5, 6], [5, 7], [5, 6])]
        found = [(await server.use(LEASE, terms=terms))[1].reason for terms in leads]
        assert found == ["preamble", "preamble", "evicted"]
        server.misses.forget(None, [name + "0" * 48, "f" * 16])
        assert (await server.use(LEASE))[1].reason == "deleted"
        assert (await server.use(LEASE))[1].reason == "evicted"
        await server.use(OTHER)
        assert (await server.use(OTHER, began=server.now - 1))[1].reason == "computing"

    asyncio.run(run())


def test_a_chunk_found_in_the_cache_is_learnt(tokenizer):
    """One that was registered, or loaded from storage, in another process."""

    async def run():
        server = Server(tokenizer)
        name, nothing = await server.use(LEASE, hit=True)
        assert nothing is None and (await server.use(LEASE.strip()))[1][:2] == ("white space", name)

    asyncio.run(run())


def test_a_tenant_learns_nothing_of_others(tokenizer):
    """The reasons of one are the same whether another has used chunks like its own or not."""

    async def run(others):
        server = Server(tokenizer)
        for text in others:
            await server.use(text, tenant="other", rid="mine")
        seen = []
        for text in (LEASE, LEASE.strip(), WRAPPED, LEASE):
            _, miss = await server.use(text, tenant="mine", rid="mine")
            seen.append(miss[:2])
        assert await server.misses.of("third", "mine") == {}
        return seen, miss.elsewhere

    (alone, nowhere), (beside, elsewhere) = asyncio.run(run([])), asyncio.run(run([LEASE, WRAPPED, OTHER]))
    assert alone == beside and (nowhere, elsewhere) == (False, False)
    assert asyncio.run(_first_elsewhere(tokenizer)) == [False, True]


async def _first_elsewhere(tokenizer):
    server = Server(tokenizer)
    return [(await server.use(LEASE, tenant=tenant))[1].elsewhere for tenant in ("a", "b")]


def test_without_a_tokenizer():
    """Windows of tokens are enough to find a text with another beginning."""

    async def run():
        rng, server = random.Random(0), Misses(FakeServer())
        ids = [rng.randrange(1000) for _ in range(200)]
        found = []
        for rid, tokens in (("a", ids), ("b", [7] * 20 + ids), ("c", ids[:50])):
            report = [{"id": rid, "offset": 0, "tokens": len(tokens), "hit": False}]
            server.note(Answered(rid, None, Terms(), tokens, report, 0.0, 1.0))
            found.append((await server.of(None, rid))[rid][:2])
        assert found[:2] == [("new", None), ("beginning", "a")]

    asyncio.run(run())


def test_a_small_share_in_common_is_not_like():
    """Fingerprints of random tokens: the share of windows that two have in common decides."""
    rng = random.Random(1)
    shared = [rng.randrange(1000) for _ in range(1000)]
    counts = []
    for part in (1000, 500, 50):
        first, second = ([*shared[:part], *(rng.randrange(1000) for _ in range(1000 - part))] for _ in range(2))
        prints = [fingerprint(None, ids, None).windows for ids in (first, second)]
        counts.append(len(set(prints[0]) & set(prints[1])))
    assert counts[0] == KEPT and counts[1] >= KEPT // 4 > counts[2]


def test_fingerprints_hold_no_text(tokenizer):
    """Numbers that another tenant's never equal, and that another process could not compute."""
    ids = tokenizer.encode(LEASE)
    mine, same, others = (fingerprint(tenant, ids, LEASE) for tenant in ("a", "a", "b"))
    assert mine == same and not {*mine.texts, *mine.windows} & {*others.texts, *others.windows}
    assert all(type(part) is int for part in (*mine.texts, *mine.windows, mine.head, mine.tail))
    assert len(mine.windows) == KEPT < len(ids) - WINDOW


@pytest.mark.parametrize("text", ["x", "Grüße, 世界 🌊", " \n\ta  b"])
def test_pieces_keep_what_matters(tokenizer, text):
    """ASCII is as it was, and different texts stay different."""
    given = TokenTexts(tokenizer).text(tokenizer.encode(text))
    assert [c for c in given if c.isascii()] == [c for c in text if c.isascii()]
    assert given != TokenTexts(tokenizer).text(tokenizer.encode(text + "界"))


def test_memory_is_bounded(tokenizer, monkeypatch):
    """By the numbers of chunks and misses; each takes what is promised."""
    for limit in ("MAX_CHUNKS", "MAX_MISSES"):
        monkeypatch.setattr(misses, limit, 50)
    rng = random.Random(0)

    async def run():
        server, sizes = Server(tokenizer), []
        for _ in range(5):
            for _ in range(60):
                await server.use([rng.randrange(600) for _ in range(300)])
            sizes.append(deep_size((server.misses._known, server.misses._alike, server.misses._misses)))
        return sizes

    sizes = asyncio.run(run())
    assert max(sizes) < 50 * 4_000 and sizes[-1] < 1.1 * sizes[1]


def test_chunks_are_examined_between_requests(tokenizer):
    """One at a time, whoever asks meanwhile; what one event loop has left, the next one goes on with."""

    async def begin(server):
        names = [f"{i:016x}" for i in range(6)]
        report = [{"id": name, "offset": 2 * i, "tokens": 2, "hit": False} for i, name in enumerate(names)]
        server.misses.note(Answered("r", None, Terms(), range(12), report, 0.0, 1.0))
        seen = []
        for _ in range(4):
            await asyncio.sleep(0)
            seen.append(len(server.misses._known))
        return seen

    server = Server(tokenizer)
    assert asyncio.run(begin(server)) == [1, 2, 3, 4]
    assert len(asyncio.run(server.misses.of(None, "r"))) == 6
    assert asyncio.run(begin(server)) == [6, 6, 6, 6]
    _, miss = asyncio.run(server.use(LEASE))
    assert miss.reason == "new" and not server.misses._num_waiting


def test_a_tokenizer_that_fails_harms_nobody(tokenizer, monkeypatch, caplog):
    async def run():
        server = Server(tokenizer)
        with monkeypatch.context() as broken:
            broken.setattr(TokenTexts, "text", lambda *_: 1 / 0)
            assert (await server.use(LEASE))[1] is None
        assert "could not be examined" in caplog.text
        assert (await server.use(LEASE))[1].reason == "new"

    asyncio.run(run())


def test_too_much_at_a_time_is_left_out(tokenizer, monkeypatch):
    async def run():
        monkeypatch.setattr(misses, "BACKLOG", 10)
        server = Server(tokenizer)
        assert (await server.use(LEASE))[1] is None
        assert (await server.use("Tea."))[1].reason == "new"

    asyncio.run(run())


def test_reasons_have_words():
    """Those that name another chunk are those that there is one for."""
    assert {*NORMALIZATIONS, *ENDS.values()} == {reason for reason, words in WORDS.items() if "{like}" in words}
