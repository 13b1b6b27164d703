"""Requests with known outputs and known KV dependencies."""

from array import array
from collections.abc import Iterable, Sequence

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.core.fills import Fill
from sglang_lazy.core.prompt import Ranges
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.core.state import LinkedRequest, fill_of, linked
from sglang_lazy.policies import get_policy

TEXT, CHUNK = False, True
ADAPTERS = ("x", "y")
"""Ids of LoRA adapters. No `extra_key` here ends in one: for plain text, such an ending names the adapter."""
VOCAB_SIZE = 16
NEUTRAL_PREAMBLE = (14, 13)
MIN_CHUNK = 2
"""How long a chunk must be for recurrent layers to use it."""


def new_request(
    parts: Iterable[tuple[bool, Sequence[int]]],
    *,
    rid: str = "request",
    extra_key: str | None = None,
    cache_salt: str | None = None,
    link: str = "block",
    max_new_tokens: int = 3,
    priority: int | None = None,
    lora_id: str | None = None,
    ahead: bool = False,
) -> Req:
    """A request for `parts`, pairs of (is chunk, tokens).

    Besides SGLang's attributes it has:
    parts, layout: what it was made from.
    future: the tokens that it will generate, and some beyond.
    contents: what the KV at each position depends on, including positions of `future`; see `contents_of`. None while
        unknown because the policy chooses by a probe.
    """
    parts = list(parts)
    ids, chunks = array("q"), []
    for is_chunk, tokens in parts:
        if is_chunk:
            chunks.append((len(ids), len(ids) + len(tokens)))
        ids.extend(tokens)
    layout = PromptLayout(tuple(chunks), cache_salt, link, ahead)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, custom_params={LAYOUT_PARAM: layout.pack()} if chunks else None
    )
    params.normalize(None)
    own = {"extra_key": extra_key, "cache_salt": cache_salt, "priority": priority, "lora_id": lora_id}
    req = Req(rid, "", ids, params, vocab_size=VOCAB_SIZE, **own)
    req.parts, req.layout = parts, layout
    req.future = array("q", (1 + (len(ids) + i) % 3 for i in range(max_new_tokens + 2)))
    policy = get_policy(layout.link) if chunks else None
    known = policy is None or not policy.probes
    req.contents = contents_of(req, policy.kept(layout, ids) if policy else ()) if known else None
    return req


def contents_of(req: Req, kept: Sequence[Ranges]) -> list[tuple]:
    """The semantics. A kept token of a chunk depends on its chunk so far and on the preamble before the chunk, in any
    prompt. All other tokens are text and depend on the whole path so far: which text, and which tokens of which chunks.
    Both are private to requests with the same adapter, extra_key and salt. The last token of a prompt is never kept.

    kept: the kept ranges of each chunk.
    """
    layout, ids, place = req.layout, req.origin_input_ids, (req.extra_key, req.lora_id)
    starts: dict[int, int] = {}
    for (start, _), ranges in zip(layout.chunks, kept, strict=True):
        starts |= {start + i: start for begin, end in ranges for i in range(begin, end)}
    starts.pop(len(ids) - 1, None)
    preamble = ()
    if starts:
        lead = tuple(ids[: layout.chunks[0][0]])
        preamble = {"none": (), "neutral": NEUTRAL_PREAMBLE, "lead": lead}[get_policy(layout.link).preamble]
    contents, path, salt = [], (), req.cache_salt
    for position, token in enumerate(ids + req.future):
        if position in starts:
            chunk_so_far = (preamble, tuple(ids[starts[position] : position + 1]))
            path += (chunk_so_far,)
            contents.append(("chunk", place, salt, chunk_so_far))
        else:
            path += (token,)
            contents.append(("text", place, salt, path))
    return contents


def without_states(req: Req, kept: Sequence[Ranges]) -> list[Ranges]:
    """`kept`, of a model with recurrent layers: chunks that are too short are text, and one at the prompt's end."""
    fit = [end - start >= MIN_CHUNK and end < len(req.origin_input_ids) for start, end in req.layout.chunks]
    return [ranges if fits else () for ranges, fits in zip(kept, fit, strict=True)]


def contents_of_fill(fill: Fill, lora_id: str | None) -> list[tuple]:
    """What the KV of a fill's tokens depends on. The fill's preamble is text, like that of any prompt.

    lora_id: the adapter of the fill.
    """
    preamble, place, salt = tuple(fill.preamble), (fill.owner.extra_key, lora_id), fill.owner.cache_salt
    contents = [("text", place, salt, preamble[: i + 1]) for i in range(len(preamble))]
    for chunk in fill.chunks:
        namespace, tokens = chunk.key.namespace, tuple(chunk.tokens)
        tenant = ((namespace.extra_key, lora_id), namespace.cache_salt)
        contents += [("chunk", *tenant, (preamble, tokens[: i + 1])) for i in range(len(tokens))]
    return contents


def kept_in(state: LinkedRequest | None, layout: PromptLayout) -> list[Ranges]:
    """The ranges that a request keeps of each chunk of the layout; none if it has no state."""
    slices = {chunk.index: chunk.kept for chunk in state.prompt.chunks} if state else {}
    return [slices.get(i, ()) for i in range(len(layout.chunks))]


def positions_of(req: Req, start: int, end: int) -> list[int]:
    """The positions of row entries [start, end); for a fill, indices into the tokens that it computes."""
    if (fill := fill_of(req)) is not None:
        return fill.row.permuted(array("q", range(len(req.origin_input_ids)))).tolist()[start:end]
    state = linked(req)
    return list(range(start, end)) if state is None or state.recomputes else state.row.positions_of(start, end).tolist()
