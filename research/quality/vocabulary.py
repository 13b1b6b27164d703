"""The small model's tokenizer: byte-level BPE trained on generated worlds, in the files that Hugging Face loads."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmark.sample import load_sample
from research.quality.facts import FIRST_NAMES, PREDICATES, SURNAMES
from research.quality.worlds import make_world
from sglang_lazy.testing.tiny_model import all_texts
from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS = 0, 1, 2

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'assistant' %} {{ message.content }}</s>"
    "{% elif message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
"""The model knows only one form of prompt, so messages are concatenated unchanged: a user's message is the prompt."""


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer, which takes about a second; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def _corpus() -> Iterator[str]:
    """Real text, worlds, and every name and value often enough to become a token."""
    yield from all_texts(load_sample())
    rng = random.Random("corpus")
    for _ in range(300):
        world = make_world(rng, "train", 16)
        yield INSTRUCTION
        yield from (document_text({"title": title, "text": text}) for title, text in world.documents)
        yield from (question_text({"question": question.text}) for question in world.single_hop + world.two_hop)
    words = [word for name in FIRST_NAMES for word in (name, f" {name}")] + [f" {name}" for name in SURNAMES]
    words += [f" {value}" for predicate in PREDICATES for value in predicate.values]
    yield from words * 100


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(directory)` loads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class Encoder:
    """Tokenizes text without special tokens, word by word from a cache, since generated text repeats its words.

    The tokenizer splits before the single spaces of generated text, so the tokens are those of the whole text.
    """

    _WORD = re.compile(r" ?[^ ]+")

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids = []
        for word in self._WORD.findall(text):
            tokens = self.known.get(word)
            if tokens is None:
                tokens = self.known[word] = self.tokenizer.encode(word, add_special_tokens=False).ids
            ids += tokens
        return ids
