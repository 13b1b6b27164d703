"""Prompts as requests carry them, and helpers to send them."""

import random

import requests

RIVER = "The river rises in the northern hills and flows south for two hundred kilometres."
RAILWAY = "A railway followed in 1871, and with it came paper mills, a brewery and the market square."
LIBRARY = "The library holds more than forty thousand books, of which the oldest was printed in Venice."
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def text(value):
    return {"type": "text", "text": value}


def chunk(value):
    return {"type": "chunk", "text": value}


def ids(kind, *tokens):
    return {"type": kind, "input_ids": list(tokens)}


def call(url, path, **body):
    response = requests.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def generate(url, **body):
    return call(url, "/generate", **{"sampling_params": GREEDY, **body})


SEGMENTS = [text("Read: "), chunk(RIVER), text(" "), chunk(LIBRARY), text(" Which town?")]


def random_prompt(seed):
    rng = random.Random(seed)
    pieces = [[rng.randrange(10, 500) for _ in range(rng.randint(1, 40))] for _ in range(7)]
    segments = [ids("chunk" if index % 2 else "text", *piece) for index, piece in enumerate(pieces)]
    return segments, sum(pieces, [])
