"""Log lines that clients could forge.

SGLang logs error messages with what clients sent, such as an adapter's name, in which a line break would begin a line
like the server's own. Here further lines of a message are indented, and other control characters escaped.

Can go once SGLang escapes what it logs.
"""

import logging
from typing import Any

from sglang_lazy.port.hooks import repair

_LINE_BREAKS = dict.fromkeys((*range(0x0A, 0x0E), 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029), "\n    ")
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F) if chr(code) != "\t"} | _LINE_BREAKS


class _Indented(logging.Formatter):
    def __init__(self, stock: logging.Formatter):
        super().__init__()
        self._stock = stock

    def format(self, record: logging.LogRecord) -> str:
        return self._stock.format(record).translate(_ESCAPED)


def indent_lines(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `configure_logger`: indent all lines of a message but the first."""
    for handler in logging.root.handlers:
        if not isinstance(handler.formatter, _Indented):
            handler.setFormatter(_Indented(handler.formatter or logging.Formatter()))


HOOKS = (
    repair(
        "sglang.srt.utils.common.configure_logger",
        indent_lines,
        "AFTER",
        "clients cannot forge lines of the log",
        "SGLang escapes what it logs",
    ),
)
