"""The command line of a tool (tools/, bench/, course/), which has no groups of flags."""

import argparse
from typing import NoReturn

from common.parallel.process import visible


class Options(argparse.ArgumentParser):
    """Parser of a tool's options. `text`, its docstring, is the help. An error is one line."""

    def __init__(self, text: str | None):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, visible(f"error: {message}\n"))
