"""Build a small Llama with random weights and a tokenizer trained on the sample documents; print where it is.

Enough to run the server anywhere in seconds. What it generates is noise.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from sample import all_texts, load_sample
from serving import device_flags, running_server

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-lazy"
DIRECTORY = CACHE / "tiny-model-1"
"""Holds the model once it is built: give it a new name when anything below changes."""

TRAINED = Path(__file__).parent / "models" / "tiny-rag"
"""A small model that was trained to answer the questions of examples/data/worlds_sample.jsonl."""

KV_POOL = ("--max-total-tokens", "40000")
"""Enough for either sample."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def train_tokenizer(texts, vocab_size: int):
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


def build_tiny_model(directory: Path) -> Path:
    """Write a 14M-parameter Llama and its tokenizer to `directory`, the same ones every time."""
    import transformers

    tokenizer = train_tokenizer(all_texts(load_sample()), vocab_size=4096)
    config = transformers.LlamaConfig(
        vocab_size=4096,
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
    return directory


def tiny_model() -> Path:
    """The directory of the tiny model, built on first use."""
    if not DIRECTORY.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            # Renamed when complete, so that an interrupted build leaves nothing half made.
            build_tiny_model(Path(scratch) / "model").replace(DIRECTORY)
    return DIRECTORY


@contextlib.contextmanager
def tiny_server(*flags: str, model: Path | None = None, log: Path = CACHE / "tiny-server.log") -> Iterator[str]:
    """Serve `model`, or else the tiny one, with `flags` for the length of a `with` block; yields the server's URL."""
    model = str(model or tiny_model())
    log.parent.mkdir(parents=True, exist_ok=True)
    usual = 60 if torch.cuda.is_available() else 25
    # To share operations of so small a model among threads takes longer than to do them.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    arguments = ["--model-path", model, *KV_POOL, *device_flags(), *flags]
    with running_server(arguments, log, usual=usual, environment=environment) as url:
        yield url


def server_or_tiny(url: str | None, *flags: str) -> contextlib.AbstractContextManager[str]:
    """The running server at `url`, or the tiny one if there is none."""
    return contextlib.nullcontext(url) if url else tiny_server(*flags)


if __name__ == "__main__":
    print(tiny_model())
