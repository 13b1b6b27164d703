"""Run a module whose servers are forks, which start in a moment: `python -m support benchmark.soak --minutes 2`."""

import runpy
import sys

from sglang_lazy.testing import processes
from support import forks

if __name__ == "__main__":
    processes.starter = forks.start
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
