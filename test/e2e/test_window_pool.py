"""Window layers in SGLang's hybrid pool, with a third of the other layers' slots: policies that keep parts of chunks,
which lose the window KV in between, against the policies' oracle."""

import pytest
from served import Served

from fakes import kv_watch
from oracle.models import MODELS
from oracle.models.build import build
from oracle.scenarios import Dice
from oracle.segments import Segment

pytestmark = pytest.mark.slow
LINKS = [
    base + link
    for base in ("", "base+", "base:preamble=lead+")
    for link in ("block", "epic:tokens=3", "query:ratio=0.3", "static:ratio=0.3")
]
SIZE, RATIO = 2400, 0.3


# Gemma 4's pools have two head shapes, and KV that later layers share.
NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(f"{name} window pool")) for name in ("gpt-oss", "gemma4")]


@pytest.fixture(scope="module", params=NAMES)
def served(request, model_dir, with_plugin):
    spec = MODELS[request.param]
    options = {**spec.cpu_options, "max_total_tokens": SIZE, "swa_full_tokens_ratio": RATIO}
    with with_plugin(kv_watch.load):
        served = Served(build(spec.name, model_dir), **options, chunked_prefill_size=96)
    yield served
    served.engine.shutdown()


def test_policies_over_chunks_that_lose_window_kv(served):
    """More batches than the window pool holds, then again, the last first: chunks are hits as long as the window KV
    that their prompts read is left, and are computed again afterwards. The other layers' slots would suffice for all
    tokens."""
    dice = Dice("windows")
    docs = dice.chunks(6, 40, 70)  # the window is 24 tokens
    prompts = [[dice.text(5), *dice.shuffled(docs)[:3], dice.text(4)] for _ in LINKS]
    prompts[1], prompts[4] = [docs[0], docs[1], dice.text(30)], [docs[3], dice.text(3), docs[2]]
    hits = []
    for start in (0, 4, 8, 8, 4, 0):
        outputs = served.answer(prompts[start : start + 4], LINKS[start : start + 4])
        hits += [chunk["hit"] for output in outputs for chunk in output["meta_info"]["chunks"]]
    again = hits[len(hits) // 2 :]
    assert again.count(True) > 5 and again.count(False) > 2


@pytest.mark.parametrize("link", ["copy", "blend"])
def test_policies_that_need_more_slots_there(served, link):
    dice = Dice("refused")
    with pytest.raises(ValueError, match="small pool of layers with windows"):
        served.ask([[dice.text(3), *dice.chunks(1, 10, 20), dice.text(3)]], [link])


def test_a_chunk_that_its_pool_cannot_hold(served):
    """Until it is complete, a chunk has window KV for all its tokens."""
    long = Segment("chunk", tuple(Dice("long").text(int(SIZE * RATIO)).ids))
    with pytest.raises(ValueError, match="--swa-full-tokens-ratio"):
        served.ask([[long, Dice("question").text(3)]], ["block"])
    served.answer([[Segment("chunk", long.ids[:300]), Dice("question").text(3)]], ["block"])
