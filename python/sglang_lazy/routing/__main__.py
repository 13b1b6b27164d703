"""Command: a middleware for the router `smg`, which selects the worker that has a prompt's chunks.

python -m sglang_lazy.routing --router http://127.0.0.1:30000 --port 30001
"""

import argparse
import logging

from aiohttp import web

from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.routing.middleware import Middleware
from sglang_lazy.routing.picker import CAPACITY, IMBALANCE, Picker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, metavar="URL", help="URL of smg.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30001)
    parser.add_argument(
        "--imbalance",
        type=float,
        default=IMBALANCE,
        help="Maximum requests in flight at a worker, as a multiple of the mean.",
    )
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="Chunks to remember per worker.")
    parser.add_argument(
        "--kv-events",
        metavar="TOKENIZER",
        help="Follow the KV events that workers publish; the path or name of their tokenizer.",
    )
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        picker = Picker(args.imbalance, args.capacity)
        hashes = BlockHashes.load(args.kv_events) if args.kv_events else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    app = Middleware(args.router, picker, hashes).app()
    # Cancel requests whose client has disconnected.
    web.run_app(app, host=args.host, port=args.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
