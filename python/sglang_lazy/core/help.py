"""How the commands' --help looks."""

import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    """--help on a screen of 40 lines and 100 columns. The descriptions' own lines are kept."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=100)


def parser_of(command: str, description: str | None, usage: str) -> argparse.ArgumentParser:
    """A parser for `python -m sglang_lazy.COMMAND`.  usage: what follows that, in short."""
    prog = f"python -m sglang_lazy.{command}"
    return argparse.ArgumentParser(prog, f"{prog} {usage}", description, formatter_class=Help)


class FirstSentences(Help):
    """Of each flag's help, only the first sentence."""

    def _expand_help(self, action: argparse.Action) -> str:
        return super()._expand_help(action).partition(". ")[0].rstrip(".")
