"""Models with seeded weights, saved on demand without a network."""

import hashlib
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from ..tokenizer import build_tokenizer
from . import MODELS
from .folders import made_once
from .spec import MAX_POSITION, ModelSpec


def build(name: str, cache_dir: str | Path) -> str:
    """The folder of model `name` under `cache_dir`, see `build_model`. Raises KeyError for an unknown name."""
    return build_model(MODELS[name], cache_dir)


def build_model(spec: ModelSpec, cache_dir: str | Path) -> str:
    """The folder of a model under `cache_dir`: config, fp32 safetensors, tokenizer; made if it is not there.

    The same spec, code and library version give the same weights.
    """

    def write(folder: Path) -> None:
        random_model(spec).save_pretrained(folder)
        if spec.released:
            file = folder / "model.safetensors"
            weights = dict(spec.released(name, weight) for name, weight in load_file(file).items())
            save_file(weights, file, {"format": "pt"})
        served = {**spec.served, **({"architectures": [spec.architecture]} if spec.architecture else {})}
        if served:
            file = folder / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **served}))
        build_tokenizer(folder, add_bos=spec.add_bos, chat_parts=spec.chat_parts, max_length=MAX_POSITION)

    return made_once(Path(cache_dir) / f"{spec.name}-{_fingerprint(spec)}", write)


def model_class(config: transformers.PretrainedConfig) -> type:
    """What makes a model that generates text of this configuration."""
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def random_model(spec: ModelSpec) -> transformers.PreTrainedModel:
    """The model in fp32 with seeded weights under which the next token depends strongly on the far context."""
    model = model_class(config := spec.config()).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            init_weight(name, weight, generator, tied=model.config.tie_word_embeddings)
            if spec.name.startswith("gemma") and "embed" in name:  # scales them up
                weight.mul_(0.5)
            if spec.name.startswith("gemma4"):  # does not scale scores
                weight.mul_(len(weight) ** -0.25 if "q_norm" in name or "k_norm" in name else 1)
                weight.mul_(2 if name.endswith("language_model.norm.weight") else 1)  # or its choices would be close
            elif spec.name.startswith("gemma") and weight.dim() == 1:  # adds one to the weights of norms
                weight.sub_(0.6)
    return model.eval()


def init_weight(name: str, weight: torch.Tensor, generator: torch.Generator, tied: bool) -> None:
    """Fill one parameter in place.

    With activations of unit size, q and k of size 1.4 give attention scores of standard deviation 2, so a few
    tokens at any distance take most of the weight, and `o` makes what they say outweigh the residual stream. Tied
    embeddings are small: otherwise every token predicts itself.
    """
    if name == "lm_head.bias":
        weight.zero_()  # SGLang adds none
    elif name.endswith("A_log"):  # of recurrent layers: decays per token of about 0.0005 to 0.1
        weight.uniform_(-7, -2, generator=generator)
    elif name.endswith("bias"):
        weight.normal_(0, 0.3, generator=generator)
    elif name.endswith("sinks"):  # as large as scores; SGLang keeps them in bf16
        weight.copy_(weight.normal_(0, 2, generator=generator).bfloat16())
    elif weight.dim() == 1:  # norms; those of q and k set the size of the scores
        low, high = (1.1, 1.7) if "q_norm" in name or "k_norm" in name else (0.6, 1.4)
        weight.uniform_(low, high, generator=generator)
    elif "embed" in name:
        # At this power, what a token gives itself is the same for any width.
        weight.normal_(0, 0.1 * min(1, 128 / weight.shape[-1]) ** 0.75 if tied else 1, generator=generator)
    else:
        gains = {
            "q_proj": 1.4,
            "k_proj": 1.4,
            "qkv_proj": 1.4,
            "o_proj": 3.0,
            "lm_head": 2.5,
            "mlp.gate.": 3.0,
            "mlp.router.": 3.0,
        }
        gain = next((gain for part, gain in gains.items() if part in name), 1.0)
        weight.normal_(0, gain / weight.shape[-1] ** 0.5, generator=generator)


def _fingerprint(spec: ModelSpec) -> str:
    """Changes whenever the same name would give another model."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "tokenizer.py"]
    code = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(code + f"{spec}{transformers.__version__}{torch.__version__}".encode()).hexdigest()[:12]
