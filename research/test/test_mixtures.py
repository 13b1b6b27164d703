"""The study of mixtures: what each takes from which computation, against the policies' oracle."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from oracle.policies import PolicyOracle, epic, keep_all_but
from oracle.scenarios import Dice
from oracle.segments import chunk, text
from research.policies import mixtures
from research.policies.mixtures import Mixed, replaced
from research.quality.worlds import records

NEWLINE = 9
TOKENIZER = SimpleNamespace(
    encode=lambda words, add_special_tokens: list(range(20, 40)), decode=lambda ids: "\n" if ids == [NEWLINE] else "a"
)
LEAD = 6
CHUNKS = ((6, 16), (16, 24), (24, 33))
"""The chunks' ranges in the prompt."""
TITLES = [6, 7, 8, 16, 17, 24, 25, 26, 27, 28, 29, 30, 31, 32]
"""Up to a newline; the last chunk has none."""


@pytest.fixture
def segments():
    ids = list(Dice(3).ids(40))
    for position in (8, 17, 21):
        ids[position] = NEWLINE
    return [text(ids[:LEAD]), *(chunk(ids[start:end]) for start, end in CHUNKS), text(ids[33:])]


def recomputed(kept):
    """The positions of the prompt that are not kept."""
    reused = {
        start + i
        for (start, _), ranges in zip(CHUNKS, kept, strict=True)
        for low, high in ranges
        for i in range(low, high)
    }
    return [position for position in range(6, 33) if position not in reused]


def sources(found, *candidates):
    """For each layer, part and token, which of `candidates` it equals: [num_layers][2][n], None for none of them."""
    return [
        [
            [
                next((i for i, each in enumerate(candidates) if each[layer][part][0, :, n].equal(mine[0, :, n])), None)
                for n in range(mine.shape[2])
            ]
            for part, mine in enumerate(pair)
        ]
        for layer, pair in enumerate(found)
    ]


def test_replaced():
    def cache(value):
        return [(torch.full((1, 2, 4, 3), value + layer), torch.full((1, 2, 4, 3), -value - layer)) for layer in (0, 1)]

    tokens = torch.tensor([False, True, False, True])
    kept, taken = [0, 0, 0, 0], [0, 1, 0, 1]
    for options, expected in (
        ({}, [[taken, taken], [taken, taken]]),
        ({"parts": ["keys"]}, [[taken, kept], [taken, kept]]),
        ({"parts": ["values"]}, [[kept, taken], [kept, taken]]),
        ({"layers": [1]}, [[kept, kept], [taken, taken]]),
    ):
        assert sources(replaced(cache(10), cache(20), tokens, **options), cache(10), cache(20)) == expected


@pytest.mark.slow
def test_leads(tiny_model, segments):
    """Answers over each mixture of the study, which keeps all chunks whole."""
    oracle = PolicyOracle(tiny_model)
    lead = segments[0].ids
    texts = {"block": (), "BOS": lead[:1], "instruction": lead[1:], "lead": lead}
    texts["neutral"] = (lead[0], *range(35, 40))
    alone, behind = oracle.fill(segments), oracle.fill(segments, lead)
    parts = {  # whether keys, and values, are those computed alone
        "lead, keys alone": lambda n: (True, False),
        "lead, values alone": lambda n: (False, True),
        "lead, first keys alone": lambda n: (n + LEAD in (6, 16, 24), False),
    }
    found = {name: (cache, kept) for name, cache, kept in mixtures.leads(Mixed(tiny_model), segments, TOKENIZER)}
    assert found.keys() == texts.keys() | parts.keys()
    for name, (cache, kept) in found.items():
        assert recomputed(kept) == []
        filled = oracle.fill(segments, texts[name]) if name in texts else None
        for layer, pair in enumerate(cache):
            for part, mine in enumerate(pair):
                for n in range(27):
                    expected = filled or (alone if parts[name](n)[part] else behind)
                    torch.testing.assert_close(mine[:, :, n], expected[layer][part][:, :, n])
    assert not torch.allclose(alone[1][0][:, :, 0], behind[1][0][:, :, 0], atol=1e-3)
    assert not torch.allclose(alone[1][1], behind[1][1], atol=1e-3)


def test_blend(tiny_model, segments):
    """Which tokens are recomputed, and which parts of titles come from where."""
    oracle, mixed = PolicyOracle(tiny_model), Mixed(tiny_model)
    found = {name: (cache, recomputed(kept)) for name, cache, kept in mixtures.blend(mixed, segments, TOKENIZER)}
    again = {name: recomputed(kept) for name, _, kept in mixtures.blend(mixed, segments, TOKENIZER)}
    count = math.ceil(0.15 * 27)
    for ratio in (0.05, 0.15, 0.3, 0.5, 0.7, 1.0):
        assert found[f"blend:ratio={ratio}"][1] == recomputed(oracle.blend(segments, ratio))
    alone, context, behind = oracle.fill(segments), mixed.in_context(segments), oracle.fill(segments, segments[0].ids)
    for layer in range(2, len(alone)):
        sizes = (context[layer][0] - alone[layer][0]).square().sum((0, 1, 3)).tolist()
        best = sorted(range(27), key=lambda n: -sizes[n])[:count]
        assert found[f"keys of layer {layer + 1}"][1] == sorted(6 + n for n in best)
    draws = [found[f"random tokens, {number}"][1] for number in (1, 2)]
    assert draws[0] != draws[1] and [len(draw) for draw in draws] == [count, count]
    assert draws == [again[f"random tokens, {number}"] for number in (1, 2)]
    (start, _), *_ = [span for span in CHUNKS if found["whole documents"][1][0] in range(*span)]
    assert found["whole documents"][1] == list(range(start, start + count))
    assert found["titles"][1] == TITLES
    scores = oracle.blend_scores(segments).tolist()
    others = sorted((p for p in range(6, 33) if p not in TITLES), key=lambda p: -scores[p - 6])
    assert found["blend without titles"][1] == sorted(others[:count])
    titles, none = [position in TITLES for position in range(6, 33)], [False] * 27
    whole = range(2, len(alone))
    for name, where in {
        "titles, keys in context": lambda layer: [titles, none],
        "titles, values in context": lambda layer: [none, titles],
        "titles, layer 2 in context": lambda layer: [titles, titles] if layer == 1 else [none, none],
        "titles, layers from 3 in context": lambda layer: [titles, titles] if layer in whole else [none, none],
        "titles behind the lead": lambda layer: [titles, titles],
    }.items():
        cache, tokens = found.pop(name)
        assert tokens == []
        source = behind if name == "titles behind the lead" else context
        for layer, pair in enumerate(cache):
            for part, mine in enumerate(pair):
                for n in range(27):
                    expected = (source if where(layer)[part][n] else alone)[layer][part][:, :, n]
                    torch.testing.assert_close(mine[:, :, n], expected)
    for cache, _ in found.values():
        torch.testing.assert_close(cache, alone)


def test_answers_over_mixtures(tiny_model, segments):
    """Over the chunks' KV under full attention, answers are those under full attention; a mixture leaves no trace."""
    oracle, mixed = PolicyOracle(tiny_model), Mixed(tiny_model)
    whole, nothing, answer = keep_all_but(segments, ()), keep_all_but(segments, range(6, 33)), [20, 30, 40]
    prompt = mixed.start_over(mixed.in_context(segments), segments, whole)
    torch.testing.assert_close(prompt.score(answer), oracle.logprobs(segments, answer[:-1], nothing))
    behind, kept = mixed.fill(segments, segments[0].ids), epic(segments, 2)
    prompt = mixed.start_over(behind, segments, kept)
    expected = oracle.logprobs(segments, answer[:-1], kept, segments[0].ids)
    torch.testing.assert_close(prompt.score(answer), expected, rtol=1e-4, atol=1e-4)
    prompt = mixed.start(segments, kept)
    torch.testing.assert_close(prompt.score(answer), oracle.logprobs(segments, answer[:-1], kept), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("study", mixtures.STUDIES)
def test_lines(tiny_model, tmp_path, monkeypatch, study, capsys):
    """A line for each prompt and mixture, with the document that has the right answer; a row for each mixture."""
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "out.jsonl"
    made = {record["id"]: record for record in records(0, "test", 2, 1, documents=(2, 4))}
    questions.write_text("".join(json.dumps(record) + "\n" for record in made.values()))
    options = ["--study", study, "--model", tiny_model, "--questions", str(questions), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *options])
    mixtures.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = list(dict.fromkeys(line["policy"] for line in lines))
    assert [(line["id"], line["policy"]) for line in lines] == [(id, name) for id in made for name in names]
    for line in lines:
        record = made[line["id"]]
        assert record["answers"][0] in record["docs"][line["right"]]["text"]
    rows = capsys.readouterr().out.splitlines()
    assert len({row.split(" | ")[0] for row in rows[2:]}) == len(rows) - 2 == len(names)
