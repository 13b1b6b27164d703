"""The parts of a prompt as token ids: text segments and chunk segments."""

from typing import Literal, NamedTuple


class Segment(NamedTuple):
    """One element of a prompt. `kind` says what its tokens may attend to; `ids` is never empty."""

    kind: Literal["text", "chunk"]
    ids: tuple[int, ...]

    def to_request(self) -> dict:
        """The segment as a request carries it."""
        return {"type": self.kind, "input_ids": list(self.ids)}


def text(ids) -> Segment:
    """Tokens that see everything before them."""
    return Segment("text", tuple(ids))


def chunk(ids) -> Segment:
    """Tokens that see only their own segment."""
    return Segment("chunk", tuple(ids))


def token_ids(segments: list[Segment]) -> list[int]:
    """The concatenated prompt."""
    return [token for segment in segments for token in segment.ids]
