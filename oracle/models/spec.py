"""What describes a model, and the settings that many share."""

import copy
import dataclasses
from collections.abc import Callable, Mapping

import torch
import transformers

from ..tokenizer import BOS, EOS, PAD, VOCAB_SIZE

MAX_POSITION = 2048
ROPE_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One architecture: its `transformers` config class, what it sets there, and how its tokenizer behaves."""

    name: str
    config_class: str
    settings: Mapping[str, object]
    add_bos: bool = False
    needs: str | None = None  # what to serve it, where a CPU does not do
    seed: int = 0  # of the weights, such that no two tokens of the tests are equally likely
    chat_parts: bool = True  # the chat template loops over content parts; otherwise it takes a string
    # A weight, as transformers saves it, by the name and in the layout of released checkpoints
    released: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None = dataclasses.field(
        default=None, repr=False
    )
    architecture: str | None = None  # in config.json, where SGLang's class is not the one that transformers has
    served: Mapping[str, object] = dataclasses.field(default_factory=dict)  # what else SGLang reads in config.json
    cpu_options: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the engine, where it needs some
    core: bool = True  # False: its attention resembles that of a core model, so tests may try less

    def config(self):
        """The Hugging Face configuration, which shares nothing with the spec."""
        common = dict(
            vocab_size=VOCAB_SIZE,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            max_position_embeddings=MAX_POSITION,
            tie_word_embeddings=False,
            dtype="float32",
        )
        return getattr(transformers, self.config_class)(**{**common, **copy.deepcopy(self.settings)})


def shape(hidden: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    return dict(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


def rope(rope_type: str = "default", **more) -> dict:
    return {"rope_type": rope_type, "rope_theta": ROPE_THETA, **more}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=MAX_POSITION // 4)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
SMALL_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
