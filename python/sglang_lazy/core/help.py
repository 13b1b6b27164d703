"""How the commands' --help looks."""

import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    """--help on a screen of 40 lines and 100 columns. The descriptions' own lines are kept."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=100)


class FirstSentences(Help):
    """Of each flag's help, only the first sentence."""

    def _expand_help(self, action: argparse.Action) -> str:
        return super()._expand_help(action).partition(". ")[0].rstrip(".")
