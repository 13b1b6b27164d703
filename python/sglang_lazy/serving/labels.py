"""The labels of chunks, as prompts and registrations have given them last."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.chunks.catalog import MIN_DIGITS
from sglang_lazy.core.keys import chunk_id, digests
from sglang_lazy.core.labels import Label
from sglang_lazy.core.remembered import Remembered
from sglang_lazy.serving.plans import Plan

CAPACITY = 1 << 25
"""The bytes of all labels: some 20,000 of the longest."""
NONE = Label()


class Labels:
    """The labels used last, by tenant and id, in `capacity` bytes. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY):
        self._labels = Remembered[tuple[str | None, str], Label](capacity)

    def add(self, tenant: str | None, labels: Mapping[str, Label]) -> None:
        """Remember labels, by the ids of a tenant's chunks, instead of their former ones."""
        for name, label in labels.items():
            self._labels.put((tenant, name), label)

    def get(self, chunks: Sequence[tuple[str | None, str]]) -> list[Label]:
        """The labels of chunks given by tenant and id; `NONE` for those without."""
        return [self._labels.get(chunk) or NONE for chunk in chunks]

    def remove(self, tenant: str | None, name: str) -> None:
        """Forget the label of a chunk.  name: its id, or more digits of its digest."""
        self._labels.pop((tenant, name[:MIN_DIGITS]))


def labels_in(plan: Plan, input_ids: list[int]) -> dict[str, Label]:
    """The labels in the plan of a prompt, by the ids of its chunks."""
    labelled = [pair for pair in zip(plan.layout.chunks, plan.labels, strict=False) if pair[1] is not None]
    names = map(chunk_id, digests(input_ids, [chunk for chunk, _ in labelled]))
    return {name: label for name, (_, label) in zip(names, labelled, strict=True) if label is not None}


def with_labels(labels: Labels, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks of a list with the fields `name` and `metadata`, null if they have none."""
    found = labels.get([(chunk["cache_salt"], chunk["id"]) for chunk in chunks])
    return [{**chunk, **label.fields()} for chunk, label in zip(chunks, found, strict=True)]


def names_of(labels: Labels, tenant: str | None, ids: Sequence[str]) -> dict[str, str]:
    """The names of a tenant's chunks, by those of `ids`, or longer parts of digests, that have any."""
    found = labels.get([(tenant, one[:MIN_DIGITS]) for one in ids])
    return {one: label.name for one, label in zip(ids, found, strict=True) if label.name is not None}


def name_chunks(labels: Labels, tenant: str | None, chunks: Iterable[dict[str, Any]]) -> None:
    """Add the field `name` to chunks of a tenant's that have one."""
    chunks = list(chunks)
    names = names_of(labels, tenant, [chunk["id"] for chunk in chunks])
    for chunk in chunks:
        if (name := names.get(chunk["id"])) is not None:
            chunk["name"] = name
