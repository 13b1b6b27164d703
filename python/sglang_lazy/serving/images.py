"""Images in the text of prompts with chunks: each is one token until its real number of tokens is known."""

import itertools
from collections.abc import Collection, Sequence

from sglang_lazy.serving.tokenization import TokenizedPrompt


def image_ranges(prompt: TokenizedPrompt, image_token: int, others: Collection[int]) -> list[tuple[int, int]]:
    """The half-open ranges of consecutive `image_token`s, one for each image.

    others: other tokens that stand for media. Raises ValueError if a chunk contains any of these tokens.
    """
    for start, end in prompt.chunks:
        if not {image_token, *others}.isdisjoint(prompt.input_ids[start:end]):
            raise ValueError(
                f"the chunk at position {start} contains the token of an image: images are allowed only in text"
            )
    ranges, position = [], 0
    for is_image, run in itertools.groupby(prompt.input_ids, image_token.__eq__):
        length = len(list(run))
        if is_image:
            ranges.append((position, position + length))
        position += length
    return ranges


def expand(
    prompt: TokenizedPrompt, image_token: int, ranges: Sequence[tuple[int, int]], lens: Sequence[int]
) -> tuple[TokenizedPrompt, list[tuple[int, int]]]:
    """`prompt` with the images at `ranges` expanded to `lens` tokens, and the images' ranges in it."""
    input_ids: list[int] = []
    places, shifts, position, shift = [], [], 0, 0
    for (start, end), length in zip(ranges, lens, strict=True):
        input_ids += prompt.input_ids[position:start]
        places.append((len(input_ids), len(input_ids) + length))
        input_ids += [image_token] * length
        position, shift = end, shift + length - (end - start)
        shifts.append((end, shift))
    input_ids += prompt.input_ids[position:]

    def moved(at: int) -> int:
        return at + next((shift for end, shift in reversed(shifts) if end <= at), 0)

    return TokenizedPrompt(input_ids, tuple((moved(start), moved(end)) for start, end in prompt.chunks)), places


def check_places(prompt: TokenizedPrompt, ranges: Sequence[tuple[int, int]], num_images: int, begins: int) -> None:
    """Raise ValueError unless a prompt has a place for each image, after the token `begins`.  ranges: the places."""
    if len(ranges) != num_images:
        raise ValueError(f"the prompt has places for {len(ranges)} images, but {num_images} are given")
    if any(prompt.input_ids[start - 1 : start] != [begins] for start, _ in ranges):
        raise ValueError("an image must follow the token that begins an image")
