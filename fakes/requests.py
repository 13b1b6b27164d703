"""Requests with known future tokens, and with what the KV of each of their tokens depends on."""

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
"""Ids of LoRA adapters, which no `extra_key` of these requests ends in: of plain text it says which has computed it."""
VOCAB_SIZE = 16
NEUTRAL_PREAMBLE = (14, 13)


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
) -> Req:
    """A request for `parts`, pairs of (is chunk, tokens).

    Besides SGLang's attributes it has:
    parts, layout: what it was made of.
    future: the tokens that it will generate, and more.
    contents: per position, those of `future` included, what its KV depends on; see `contents_of`. None where that is
        not known yet, since the policy chooses by a probe.
    """
    parts = list(parts)
    ids, chunks = array("q"), []
    for is_chunk, tokens in parts:
        if is_chunk:
            chunks.append((len(ids), len(ids) + len(tokens)))
        ids.extend(tokens)
    layout = PromptLayout(tuple(chunks), cache_salt, link)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, custom_params={LAYOUT_PARAM: layout.pack()} if chunks else None
    )
    params.normalize(None)
    req = Req(rid, "", ids, params, vocab_size=VOCAB_SIZE, extra_key=extra_key, priority=priority, lora_id=lora_id)
    req.parts, req.layout = parts, layout
    req.future = array("q", (1 + (len(ids) + i) % 3 for i in range(max_new_tokens + 2)))
    policy = get_policy(layout.link) if chunks else None
    known = policy is None or not policy.probes
    req.contents = contents_of(req, policy.kept(layout, ids) if policy else ()) if known else None
    return req


def contents_of(req: Req, kept: Sequence[Ranges]) -> list[tuple]:
    """The semantics. A kept token of a chunk depends on its chunk so far and on the preamble that this was computed
    behind, in whatever prompt. All others are text and depend on the whole path so far: which text, and which tokens of
    which chunks. Either is private to those who share adapter and extra_key and, from the first kept token on, the
    salt. The last token of a prompt is never kept.

    kept: per chunk.
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
    contents, path, salt = [], (), None
    for position, token in enumerate(ids + req.future):
        if position in starts:
            salt = layout.cache_salt
            chunk_so_far = (preamble, tuple(ids[starts[position] : position + 1]))
            path += (chunk_so_far,)
            contents.append(("chunk", place, salt, chunk_so_far))
        else:
            path += (token,)
            contents.append(("text", place, salt, path))
    return contents


def contents_of_fill(fill: Fill, lora_id: str | None) -> list[tuple]:
    """What the KV of a fill's tokens depends on, part by part: its preamble is text like that of any prompt.

    lora_id: the adapter that it is computed with.
    """
    preamble, place = tuple(fill.preamble), (fill.owner.extra_key, lora_id)
    contents = [("text", place, None, preamble[: i + 1]) for i in range(len(preamble))]
    for chunk in fill.chunks:
        namespace, tokens = chunk.key.namespace, tuple(chunk.tokens)
        tenant = ((namespace.extra_key, lora_id), namespace.cache_salt)
        contents += [("chunk", *tenant, (preamble, tokens[: i + 1])) for i in range(len(tokens))]
    return contents


def kept_in(state: LinkedRequest | None, layout: PromptLayout) -> list[Ranges]:
    """Per chunk of the layout, what a request keeps of it; nothing at all where it has no state."""
    slices = {chunk.index: chunk.kept for chunk in state.prompt.chunks} if state else {}
    return [slices.get(i, ()) for i in range(len(layout.chunks))]


def positions_of(req: Req, start: int, end: int) -> list[int]:
    """The positions of row entries [start, end); of a fill, places in what it computes."""
    if (fill := fill_of(req)) is not None:
        return fill.row.permuted(array("q", range(len(req.origin_input_ids)))).tolist()[start:end]
    state = linked(req)
    return list(range(start, end)) if state is None or state.recomputes else state.row.positions_of(start, end).tolist()
