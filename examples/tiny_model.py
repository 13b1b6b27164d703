"""Build a small Llama with random weights and a tokenizer trained on the sample documents; print where it is.

Enough to run the server anywhere in seconds. What it generates is noise.
"""

import os
import tempfile
from pathlib import Path

from sample import all_texts, load_sample

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-lazy"
DIRECTORY = CACHE / "tiny-model-1"
"""Holds the model once it is built: give it a new name when anything below changes."""

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
    import torch
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


if __name__ == "__main__":
    print(tiny_model())
