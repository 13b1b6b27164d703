"""Messages of several lines in logs: clients, whose texts messages have, cannot forge lines with them."""

import logging

_LINE_BREAKS = dict.fromkeys((*range(0x0A, 0x0E), 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029), "\n    ")
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F) if chr(code) != "\t"} | _LINE_BREAKS
"""How characters of messages are written into a log."""


class Indented(logging.Formatter):
    """Formats as `stock` does, with all lines of a message but the first indented, and control characters escaped."""

    def __init__(self, stock: logging.Formatter):
        super().__init__()
        self._stock = stock

    def format(self, record: logging.LogRecord) -> str:
        return self._stock.format(record).translate(_ESCAPED)
