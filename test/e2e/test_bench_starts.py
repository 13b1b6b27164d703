"""`sglang-lazy bench` starts a server with the flags after --, and says why one does not start."""

import pytest

from sglang_lazy import bench
from sglang_lazy.testing import device_flags

pytestmark = pytest.mark.slow


def test_it_starts_a_server_and_ends_it(tiny_model, capsys):
    flags = [*device_flags(), "--max-total-tokens", "4000", "--lazy-default-link", "base"]
    bench.main(["--model-path", tiny_model, "--count", "2", "--chunks", "2", "--words", "10", "--", *flags])
    assert [line.split()[-5] for line in capsys.readouterr().out.splitlines()[3:]] == ["base", "full"] * 4


def test_a_server_that_does_not_start_is_shown(tiny_model, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--model-path", tiny_model, "--", *device_flags(), "--page-size", "16"])
    assert ended.value.code == 2 and "page size 16" in capsys.readouterr().err
