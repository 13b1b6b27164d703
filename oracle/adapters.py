"""Random LoRA adapters for tiny models, and the equivalent merged models."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
"""Of the names of weights in an adapter's file."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path, weights: dict[str, tuple[torch.Tensor, torch.Tensor]], alpha: int, modules: Sequence[str] = ()
) -> Path:
    """Write an adapter as PEFT does.

    weights: each module's factors A [r, in] and B [out, r], all with one r.
    modules: what it says that it adapts, if that is not the last parts of their names.
    """
    path.mkdir(exist_ok=True)
    tensors = {}
    for name, (a, b) in weights.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": next(iter(weights.values()))[0].shape[0],
        "lora_alpha": alpha,
        "target_modules": sorted(modules or {name.rpartition(".")[2] for name in weights}),
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def random_adapter(
    model: str, path: Path, seed: int, rank: int = 4, modules: Sequence[str] = MODULES, prefix: str = ""
) -> Path:
    """Write an adapter for the model in a folder, large enough to change its answers about as much as other weights.

    prefix: of the names of the weights to adapt.
    """
    generator, alpha = torch.Generator().manual_seed(seed), 2 * rank
    weights = {}
    for name, weight in sorted(load_file(Path(model) / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if name.startswith(prefix) and module.rpartition(".")[2] in modules:
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(weight.shape[0], rank, generator=generator)
            # alpha / rank is 2: rows of the product are as large as rows of the weights
            weights[module] = a, b * weight.std() / (2 * rank**0.5)
    return write_adapter(path, weights, alpha)


def split(adapter: Path, path: Path, parts: dict[str, dict[str, int]], modules: Sequence[str]) -> Path:
    """Write an adapter with another's products, in which some modules are several.

    parts: by the last part of a module's name, those of its parts, and how many rows each has.
    modules: see `write_adapter`.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = {}
    for name in factors:
        if "lora_A" not in name:
            continue
        a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
        layer, _, module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight").rpartition(".")
        rows = parts.get(module, {module: len(b)})
        for part, of_part in zip(rows, b.split([*rows.values()]), strict=True):
            weights[f"{layer}.{part}"] = a.clone(), of_part.clone()
    return write_adapter(path, weights, config["lora_alpha"], modules)


def merged(model: str, adapter: Path, path: Path) -> Path:
    """The model with an adapter merged into its weights: W + alpha / r * B A."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    for name, product in products(adapter):
        weights[name] += product
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def merge(model: torch.nn.Module, adapter: Path) -> None:
    """The same for a loaded model."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, product in products(adapter):
            weights[name] += product.to(weights[name])


def products(adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the products that an adapter adds, [out, in], with the names of the weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in factors:
        if "lora_A" in name:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            delta = factors[name.replace("lora_A", "lora_B")] @ factors[name]
            yield f"{module}.weight", config["lora_alpha"] / config["r"] * delta
