"""From questions to rows of results: forms of prompts, conditions, and an evaluation on real servers."""

import dataclasses
import json
import random
import sys
import types

import pytest
import torch
from transformers import AutoTokenizer

from oracle.models.build import build
from oracle.segments import chunk, text, token_ids
from research.quality import conditions, evaluate
from research.quality.asking import Answered, Prompts, as_user_message
from research.quality.conditions import CONDITIONS, shuffled
from research.quality.evaluate import summarise, table
from research.quality.questions import Question, generated
from research.quality.reference import Claim, Reference
from research.quality.worlds import records

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK_CONDITIONS = ("cold", "warm", "shuffled", "32 at a time")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_prompts(tokenizer):
    """Tokens equal the server's; BOS and the opening are optional; a chunk starts at its own first token."""
    prompts = Prompts(tokenizer)
    question = next(generated(1, hops=1))
    whole = prompts.make(question)
    assert [segment.kind for segment in whole] == ["text", *["chunk"] * len(question.chunks), "text"]
    assert tokenizer.decode(whole[1].ids) == question.chunks[0]
    assert prompts.make(question, bos=False) == [text(whole[0].ids[1:]), *whole[1:]]
    assert prompts.make(question, opening=False) == [text(whole[0].ids[:1]), *whole[1:]]
    assert prompts.make(question, bos=False, opening=False) == whole[1:]
    assert token_ids(whole)[0] == tokenizer.bos_token_id


def test_prompt_with_a_history(tokenizer):
    """Each exchange is tokenized by itself, with or without the opening."""
    question = next(generated(1, hops=1))
    chat = dataclasses.replace(question, history=("Question: Who?\nAnswer: Ada.\n\n", "Question: When?"))
    ids = [token for exchange in chat.history for token in tokenizer.encode(exchange, add_special_tokens=False)]
    for opening in (True, False):
        first, *rest = Prompts(tokenizer).make(question, opening=opening)
        assert Prompts(tokenizer).make(chat, opening=opening) == [text((*first.ids, *ids)), *rest]


def test_chat(tokenizer):
    """As a message, the prompt is what the chat template makes of its text, with one BOS and the same chunks."""
    question = next(generated(1, hops=1))
    segments = Prompts(tokenizer).make(as_user_message(question, tokenizer))
    content = question.opening + "".join(question.chunks) + question.closing
    message = [{"role": "user", "content": content}]
    assert tokenizer.decode(token_ids(segments)) == tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )
    assert segments[1:-1] == Prompts(tokenizer).make(question)[1:-1]


def test_chat_whose_template_alone_has_bos(model_dir):
    """Where the tokenizer adds no BOS, the template's first token stays."""
    tokenizer = AutoTokenizer.from_pretrained(build("qwen2", model_dir))
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    assert not tokenizer.encode("")
    ids = token_ids(Prompts(tokenizer).make(as_user_message(next(generated(1, hops=1)), tokenizer)))
    assert ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]


def test_questions_longer_than_the_context_are_left_out(tokenizer, capsys):
    short, exact, long = generated(3, hops=1)
    prompts = Prompts(tokenizer)
    context = len(token_ids(prompts.make(exact))) + exact.max_new_tokens
    short = dataclasses.replace(short, chunks=exact.chunks[:-1], closing=exact.closing)
    long = dataclasses.replace(long, group="other", chunks=exact.chunks, closing=exact.closing + " again")
    assert evaluate.within_context([short, exact, long], prompts, context) == [short, exact]
    assert capsys.readouterr().err == f"other: 1 questions left out, longer than the model's {context} tokens\n"


def test_shuffled():
    segments = [text([1]), *(chunk([n]) for n in range(9)), text([2]), chunk([10]), text([3])]
    other = shuffled(segments, random.Random(0))
    assert other != segments and sorted(other) == sorted(segments)
    assert [segment.kind for segment in other] == [segment.kind for segment in segments]


def test_summary():
    """Half of the answers are right; a quarter of them differ from the reference."""
    lines = [
        {
            "condition": "cold",
            "group": "1-hop",
            "exact_match": float(n < 2),
            "score": 0.5 + 0.5 * (n < 2),
            "prompt_tokens": 10,
            "cached_tokens": n,
            "same_as_reference": n != 3,
        }
        for n in range(4)
    ]
    row = summarise(lines)
    assert (row["n"], row["exact_match"], row["score"], row["cached_share"]) == (4, 0.5, 0.75, 0.15)
    assert row["same_as_reference"] == 0.75 and row["exact_match_interval"] == [0.15, 0.85]
    assert "| cold | 4 | 50.0 (15.0 to 85.0) | 75.0 (" in table([row])


@pytest.mark.slow
def test_on_a_server(tiny_model, tmp_path, monkeypatch):
    """In fp32 on the CPU every served answer equals the reference's, whatever is cached; every answer is recorded."""
    docs = tmp_path / "worlds.jsonl"
    docs.write_text("".join(json.dumps(r) + "\n" for r in records(0, "test", 3, 1, documents=(2, 4))))
    passages = "".join(f"Passage {n}:\nThe river {n} rises in the hills.\n" for n in range(1, 4))
    bench = tmp_path / "bench.jsonl"
    fields = {"input": "Where?", "context": passages, "answers": ["hills"], "dataset": "musique"}
    bench.write_text("".join(json.dumps({**fields, "_id": n}) + "\n" for n in range(3)))
    out = tmp_path / "out"
    arguments = ["--model", tiny_model, "--out", str(out), "--questions", str(docs), str(bench), "--conditions"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments, *CHUNK_CONDITIONS, "--", "--max-total-tokens", "9000"])
    evaluate.main()

    environment, *rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert environment["model"] == tiny_model
    assert [(row["condition"], row["group"], row["n"]) for row in rows] == [
        (condition, group, 3) for condition in CHUNK_CONDITIONS for group in ("worlds", "musique")
    ]
    assert all(row["same_as_reference"] == 1 for row in rows)
    cached = {row["condition"]: row["cached_share"] for row in rows if row["group"] == "worlds"}
    assert cached["cold"] == 0 and cached["shuffled"] > 0.6 and cached["warm"] > 0.95
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 6 * len(CHUNK_CONDITIONS) and {"answer", "gap", "id"} <= answers[0].keys()
    assert (out / "table.md").read_text().count("| cold |") == 2


def test_conditions():
    """Full attention, cached chunks and eviction each have a server of their own."""
    assert CONDITIONS["full"].server != CONDITIONS["cold"].server != CONDITIONS["after eviction"].server
    assert all(name == condition.name for name, condition in CONDITIONS.items())
    assert isinstance(next(generated(1, 1)), Question)


def test_reference(tiny_model):
    """In a batch of unequal lengths: the greedy answer is judged right, anything else wrong."""
    reference = Reference(tiny_model, torch.float32, "cpu")
    rng = random.Random(0)

    def prompt(count: int) -> list:
        ids = [[rng.randrange(10, 500) for _ in range(rng.randint(3, 30))] for _ in range(count + 1)]
        return [*map(chunk, ids[1:]), text(ids[0])]

    claims = [Claim(segments, reference.answer(segments, 4), 4) for segments in (prompt(1), prompt(5), prompt(0))]
    assert [len(claim.output_ids) for claim in claims] == [4, 4, 4]
    assert all(verdict.same and verdict.gap > 0 for verdict in reference.judge(claims))
    wrong = [
        dataclasses.replace(claims[0], output_ids=[*claims[0].output_ids[:3], 9]),
        dataclasses.replace(claims[1], limit=5),  # greedy decoding would go on
        dataclasses.replace(claims[2], output_ids=claims[2].output_ids[:3]),
        dataclasses.replace(claims[2], segments=[chunk(claims[1].segments[-1].ids), *claims[2].segments]),
    ]
    assert not any(verdict.same for verdict in reference.judge(wrong))


def test_evicting(tokenizer, monkeypatch):
    """Each question recurs within eight questions, and the second answer is the one that counts."""
    sent = []

    def ask_all(url, asks, concurrency):
        sent.extend(asks)
        return [Answered([number], 10, 0) for number in range(len(asks))]

    monkeypatch.setattr(conditions, "ask_all", ask_all)
    monkeypatch.setattr(conditions, "Client", lambda url: types.SimpleNamespace(flush_cache=lambda: None))
    questions = list(generated(30, hops=1))
    served = list(conditions.ask("url", CONDITIONS["after eviction"], questions, Prompts(tokenizer)))
    assert [one.question for one in served] == questions and len(sent) == 60
    prompts = [ask.segments for ask in sent]
    for one in served:
        first, second = (index for index, prompt in enumerate(prompts) if prompt == one.segments)
        assert one.answered.output_ids == [second] and second - first <= 3 * conditions.LATER + 1


def test_the_reference_computes_as_the_servers_do(tiny_model):
    """--dtype and --enable-fp32-lm-head hold for it too: its logits are then fp32 sums over what bf16 layers give."""
    flags = ["--mem-fraction-static", "0.6", "--dtype", "bfloat16", "--enable-fp32-lm-head"]
    usual = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert evaluate.numerics([]) == {"dtype": usual, "device": DEVICE, "fp32_lm_head": False}
    assert evaluate.numerics(flags) == {"dtype": torch.bfloat16, "device": DEVICE, "fp32_lm_head": True}

    claim = Claim([text(range(20, 60))], [7, 8], limit=2)
    ids = torch.tensor([[*range(20, 60), 7, 8]])
    plain = Reference(tiny_model, torch.bfloat16, "cpu")
    wide = Reference(tiny_model, torch.bfloat16, "cpu", fp32_lm_head=True)
    with torch.inference_mode():
        hidden = plain.model.model(ids).last_hidden_state[0, -3:]
    logits = hidden.float() @ plain.model.lm_head.weight.float().T
    torch.testing.assert_close(wide._last_logits([claim])[0], logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain._last_logits([claim])[0], logits.bfloat16().float(), rtol=0.01, atol=0.01)
    assert not torch.equal(logits, logits.bfloat16().float())
    assert wide.model.model.embed_tokens.weight.dtype == torch.bfloat16
