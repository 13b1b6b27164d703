"""Shared by the programs here: documents, a question, and the server's address."""

import argparse

DOCUMENTS = [
    "The Eiffel Tower was completed in 1889. It stands on the Champ de Mars in Paris and is 330 metres tall.",
    "The Golden Gate Bridge was opened in 1937. It spans the strait between San Francisco Bay and the Pacific.",
    "The Atomium was built for the Expo of 1958 in Brussels. Its nine spheres form the cell of an iron crystal.",
]
QUESTION = "Which of them is the oldest?"


def server_url(description: str) -> str:
    """The value of --url, such as http://127.0.0.1:30000."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a server with chunk reuse, started with --enable-cache-report")
    return parser.parse_args().url


def orders() -> list[list[str]]:
    """The documents in two orders: a prefix cache reuses nothing in the second."""
    return [DOCUMENTS, DOCUMENTS[::-1]]
