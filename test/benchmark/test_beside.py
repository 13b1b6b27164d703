"""How much was copied when a pass ended."""

import pytest

from benchmark.serving.beside import progress


@pytest.mark.parametrize(("moment", "done"), [(0, 0), (5, 0.5), (10, 1), (12, 1.1), (29, 1.95), (30, 2), (40, 2)])
def test_the_last_copy_counts_in_part(moment, done):
    assert progress(moment, [10, 30]) == pytest.approx(done)
