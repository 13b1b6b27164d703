"""A small Llama with random weights, to run a server anywhere in seconds. Its output is noise."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-lazy"
"""The folder for models once they are built."""

VOCAB_SIZE = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def all_texts(requests: Iterable[Mapping[str, Any]]) -> list[str]:
    """All texts of retrieval requests (`docs`, `question`), each document once, to train a tokenizer on."""
    requests = list(requests)
    documents = {document_text(doc): None for request in requests for doc in request["docs"]}
    return [INSTRUCTION, *documents, *map(question_text, requests)]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE):
    """A byte-level BPE tokenizer with at most `vocab_size` tokens, trained on `texts` in about a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def tiny_model(texts: Iterable[str]) -> Path:
    """The directory of the tiny model whose tokenizer is trained on `texts`, built on first use."""
    texts = list(texts)
    # The name includes a hash of this file: a changed recipe is another model.
    digest = hashlib.sha256(Path(__file__).read_bytes() + "\0".join(texts).encode()).hexdigest()
    directory = CACHE / f"tiny-model-{digest[:12]}"
    if not directory.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _build(Path(scratch) / "model", texts)
            put(Path(scratch) / "model", directory)
    return directory


def put(made: Path, directory: Path) -> None:
    """Move a complete model to its place, so that an interrupted build leaves no partial one. Where another process was
    first, its model stays."""
    try:
        made.replace(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _build(directory: Path, texts: Iterable[str]) -> None:
    """Write a 14M-parameter Llama and its tokenizer to `directory`, with a fixed seed."""
    import transformers

    tokenizer = train_tokenizer(texts)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
