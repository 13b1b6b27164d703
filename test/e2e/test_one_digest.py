"""Two texts with the same SHA-256, which nobody has found yet: they are still two chunks."""

import pytest
from test_oracle_matrix import Served, hits

from fakes import one_digest
from oracle.scenarios import Dice
from oracle.segments import chunk

pytestmark = pytest.mark.slow  # starts an engine


@pytest.fixture
def served(model_dir, with_plugin):
    with with_plugin(one_digest.load):
        served = Served("llama", model_dir)
    yield served
    served.engine.shutdown()


def test_both_are_answered_rightly(served):
    """Filled together, resident together, each without the other, and with the same text after them."""
    dice = Dice("one digest")
    one, other = (chunk(one_digest.MARK + dice.ids(20)) for _ in range(2))
    shorter = chunk(one.ids[:9])
    behind = dice.text(12)
    prompts = [[dice.text(3), one, behind], [dice.text(3), other, behind]]
    outputs = served.answer(*prompts, [dice.text(2), one, dice.text(2), other, dice.text(4)])
    assert not any(hit for output in outputs for hit in hits(output))
    ids = {entry["id"] for output in served.answer(*prompts) for entry in output["meta_info"]["chunks"]}
    assert len(ids) == 2  # reported by the process with the real hash
    assert all(all(hits(output)) for output in served.answer(*prompts))
    served.flush()
    head = dice.text(3)
    for first, second in ((one, other), (other, one), (shorter, other), (other, shorter)):
        served.flush()
        assert hits(served.answer([head, first, behind])[0]) == [False]
        assert hits(served.answer([head, second, behind])[0]) == [False]
        assert hits(served.answer([head, first, behind])[0]) == [True]
