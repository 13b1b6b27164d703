"""Command `sglang-lazy`: the server, and what goes with it."""

import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("launch_server", "start a server that reuses chunks"),
    "doctor": ("doctor", "say what this machine and these flags would serve, and what they refuse, without weights"),
    "verify": ("verify", "compare policies on your prompts, and recommend one"),
    "bench": ("bench", "measure first tokens of your prompts, with chunks and without, on a server"),
    "precompute": ("precompute", "compute a corpus into storage, ahead of its use"),
    "routing": ("routing", "send prompts to the worker that has their chunks, before the router smg"),
}
"""The module of each command, and what it is for."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items())
    return "\n".join(
        [
            "usage: sglang-lazy COMMAND [flags]; each command has --help",
            "",
            *lines,
            "",
            "  sglang-lazy doctor --model-path MODEL",
            "  sglang-lazy serve --model-path MODEL --port 30000",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Become the command that is named first. Exits with status 2 if there is none of that name."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(usage())
        return
    if name not in COMMANDS:
        print(usage() if not name else f"sglang-lazy: there is no command {name!r:.50}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    # A server's processes import the module that they were started with, so the command must be that module.
    os.execv(sys.executable, [sys.executable, "-m", f"sglang_lazy.{COMMANDS[name][0]}", *rest])


if __name__ == "__main__":
    main()
