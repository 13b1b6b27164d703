"""Command: a middleware for the router `smg`, which selects the worker that has a prompt's chunks.

python -m sglang_lazy.routing --router http://127.0.0.1:30000 --port 30001
"""

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence

from aiohttp import web
from yarl import URL

from sglang_lazy.core.help import parser_of
from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.routing.middleware import Middleware
from sglang_lazy.serving.picker import CAPACITY, IMBALANCE, Picker


def _at_least_one(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of a flag, for argparse, which names the flag in its errors.  kind: int or float."""

    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) >= 1:
                return value
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r:.50}")

    return number


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be from 1 to 65535, got {text!r:.50}")


def _url(text: str) -> str:
    with contextlib.suppress(ValueError):
        url = URL(text)
        if url.scheme in ("http", "https") and url.host:
            return text
    raise argparse.ArgumentTypeError(f"must be a URL like http://127.0.0.1:30000, got {text!r:.50}")


def _hashes(tokenizer: str) -> BlockHashes:
    try:
        return BlockHashes.load(tokenizer)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags. Exits if one is invalid."""
    parser = parser_of("routing", __doc__, "--router URL [options]")
    parser.add_argument("--router", type=_url, required=True, metavar="URL", help="URL of smg.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen at (default: %(default)s).")
    parser.add_argument(
        "--port", type=_port, default=30001, metavar="PORT", help="Port to listen at (default: %(default)s)."
    )
    parser.add_argument(
        "--imbalance",
        type=_at_least_one(float),
        default=IMBALANCE,
        metavar="X",
        help="Maximum requests in flight at a worker, in means of all (default: %(default)s).",
    )
    parser.add_argument(
        "--capacity",
        type=_at_least_one(int),
        default=CAPACITY,
        metavar="N",
        help="Chunks to remember per worker (default: %(default)s).",
    )
    parser.add_argument(
        "--kv-events",
        type=_hashes,
        metavar="TOKENIZER",
        help="Follow the KV events that workers publish; the path or name of their tokenizer.",
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    app = Middleware(args.router, Picker(args.imbalance, args.capacity), args.kv_events).app()
    # Cancel requests whose client has disconnected.
    web.run_app(app, host=args.host, port=args.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
