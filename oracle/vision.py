"""Tiny random models that see images, with their processors, built without a network.

Their language models use M-RoPE: positions on three axes, equal for text.
"""

import dataclasses
import json
from pathlib import Path

import torch
import transformers

from .hybrids import HybridOracle
from .models.build import init_weight
from .models.hybrids import AXES, DELTA, EXPERTS
from .policies import Layers, PolicyOracle
from .segments import Segment, token_ids
from .tokenizer import VOCAB_SIZE, build_tokenizer

IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + IMAGE_TEXT + "{% endif %}{% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + len(SPECIAL))
MAX_POSITION = 2048
LAYERS = 3


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """An architecture by its names in `transformers`, with the settings of its two parts that others lack."""

    config: str
    processor: str
    vision: dict
    text: dict


VISION_MODELS = {
    "qwen2.5-vl": VisionSpec(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLProcessor",
        dict(fullatt_block_indexes=[1], window_size=56, tokens_per_second=2),
        dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6])),
    ),
    # Axes interleaved, and image embeddings added behind several layers
    "qwen3-vl": VisionSpec(
        "Qwen3VLConfig",
        "Qwen3VLProcessor",
        dict(deepstack_visual_indexes=[0, 1], num_position_embeddings=64),
        dict(
            head_dim=32,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
            ),
        ),
    ),
}

HYBRIDS = {
    "qwen3.5-moe": VisionSpec(
        "Qwen3_5MoeConfig",
        "Qwen3VLProcessor",
        dict(num_position_embeddings=64, deepstack_visual_indexes=[]),  # the latter is for SGLang, as released
        dict(**DELTA, **EXPERTS, head_dim=32, num_hidden_layers=4, rope_parameters=AXES),
    ),
}
"""Those with recurrent layers."""


def vision_config(name: str, width: int = 1) -> transformers.PretrainedConfig:
    """width: of the language model's heads and hidden states, in units of 32 and 128."""
    spec = (VISION_MODELS | HYBRIDS)[name]
    head = {"head_dim": 32 * width} if "head_dim" in spec.text else {}
    rope = spec.text["rope_parameters"]
    sections = [width * section for section in rope["mrope_section"]]
    vision = {**spec.vision, "out_hidden_size": 128 * width}
    return getattr(transformers, spec.config)(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
        dtype="float32",
        vision_config=dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=14, **vision),
        text_config={
            **dict(vocab_size=VOCAB_SIZE + 32, max_position_embeddings=MAX_POSITION, num_hidden_layers=LAYERS),
            **dict(
                hidden_size=128 * width, intermediate_size=256 * width, num_attention_heads=4, num_key_value_heads=2
            ),
            **{**spec.text, **head, "rope_parameters": {**rope, "mrope_section": sections}},
        },
    )


def build_vision_model(name: str, path: Path, width: int = 1) -> Path:
    """The model `name` in folder `path`: config, fp32 safetensors, tokenizer and processor."""
    config, processor = vision_config(name, width), (VISION_MODELS | HYBRIDS)[name].processor
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, weight in sorted(model.named_parameters()):
            init_weight(parameter, weight, generator, tied=False)
    model.save_pretrained(path)
    build_tokenizer(path, add_bos=False, chat_parts=True, max_length=MAX_POSITION)
    # The class that Auto chooses for Qwen3.5 adds a token of its own.
    kind = transformers.PreTrainedTokenizerFast if name in HYBRIDS else transformers.AutoTokenizer
    tokenizer = kind.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [VISION_START, VISION_END, IMAGE, VIDEO]
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    pixels = dict(patch_size=14, merge_size=2, temporal_patch_size=2, size=dict(shortest_edge=3136, longest_edge=50176))
    (path / "preprocessor_config.json").write_text(
        json.dumps(dict(image_processor_type="Qwen2VLImageProcessor", processor_class=processor, **pixels))
    )
    video = processor.replace("Processor", "VideoProcessor").replace("2_5_", "2")
    (path / "video_preprocessor_config.json").write_text(
        json.dumps(dict(video_processor_type=video, processor_class=processor, **pixels))
    )
    return path


class WithImages:
    """Mixed into an oracle: prompts with images. The positions on three axes are Hugging Face's."""

    def __init__(self, model_path: str):
        super().__init__(model_path)
        self.processor = transformers.AutoImageProcessor.from_pretrained(model_path, use_fast=False)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
        self.media, self.table = {}, torch.zeros(3, 0, dtype=torch.long)

    def show(self, segments: list[Segment], images: list) -> list[Segment]:
        """Expand a prompt's image tokens, one for each of `images` (PIL), to as many as each image takes. Later calls
        are about this prompt."""
        shown = self.processor(images=images, return_tensors="pt") if images else {}
        grids = shown.get("image_grid_thw", [])
        lens = iter([int(grid.prod()) // self.processor.merge_size**2 for grid in grids])
        expanded = [
            Segment(
                segment.kind, tuple(i for token in segment.ids for i in [token] * (next(lens) if token == IMAGE else 1))
            )
            for segment in segments
        ]
        assert next(lens, None) is None
        self.media, ids = dict(shown), torch.tensor([token_ids(expanded)])
        if images:
            kinds = (ids == IMAGE).int()
            self.table = self.model.model.get_rope_index(ids, kinds, image_grid_thw=grids)[0][:, 0]
        else:
            self.table = torch.arange(ids.shape[1]).expand(3, -1)
        return expanded

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions in the prompt, [n], on the axes, [3, 1, n]."""
        last = self.table.shape[1] - 1
        behind = self.table[0, last] + positions - last
        return torch.where(positions > last, behind, self.table[:, positions.clamp(max=last)])[:, None]


class HybridVisionOracle(WithImages, HybridOracle):
    """The oracle of models with recurrent layers."""


class VisionOracle(WithImages, PolicyOracle):
    """The oracle of the others."""

    filling = False

    def fill(self, segments: list[Segment], preamble=()) -> Layers:
        self.filling = True
        try:
            return super().fill(segments, preamble)
        finally:
            self.filling = False

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        if self.filling:  # a chunk and its preamble, not part of the prompt: all text
            return (positions + self.table[0, positions[-1]] - positions[-1]).expand(3, 1, -1)
        return super().places(positions)

    def forward(self, ids, *args, **options):
        return super().forward(ids, *args, **(self.media if IMAGE in ids else {}), **options)
