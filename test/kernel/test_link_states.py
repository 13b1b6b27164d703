"""link_states against the recurrence itself, token by token in float64, which knows of no transitions."""

import dataclasses
import random

import pytest
import torch
from cases import DTYPES
from ragged import DEVICE, NAN

from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.states import Effects, StateRows

all_names = pytest.mark.parametrize("name", ["torch", "triton"])
HEADS = 2
ARITHMETIC = 3e-6  # relative error of products of six fp32 matrices


@dataclasses.dataclass
class Tokens:
    """What a recurrent layer computes of some tokens, in float64: key, value and gates of each, heads first.

    k: [HEADS, n, K].  v: [HEADS, n, V].  decay: [HEADS, n].  write: [HEADS, n], None for Mamba-2, which forgets
    nothing but by decay.
    """

    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    write: torch.Tensor | None

    def run(self, state):
        """The state after the tokens, from `state`, [HEADS, any, K]."""
        for t in range(self.decay.shape[1]):
            k, state = self.k[:, t, None], state * self.decay[:, t, None, None]
            if self.write is None:
                state = state + self.v[:, t, :, None] * k
            else:
                error = self.v[:, t] - (state * k).sum(-1)
                state = state + (self.write[:, t, None] * error)[..., None] * k
        return state


def draw(kind, n, v, k, gen):
    """n tokens of a model that remembers: A_log from -7 to -2, a step of about 0.7."""
    rate = torch.empty(HEADS, 1).uniform_(-7, -2, generator=gen).double().exp()
    decay = (-rate * torch.rand(HEADS, n, generator=gen).double() * 1.4).exp()
    keys, values = (torch.randn(HEADS, n, dim, generator=gen).double() for dim in (k, v))
    if kind == "mamba":
        return Tokens(keys / k**0.5, values, decay, None)
    keys = keys + 0.5 * torch.randn(HEADS, 1, k, generator=gen)  # alike, as in real models, so that they erase a lot
    return Tokens(keys / keys.norm(dim=-1, keepdim=True), values, decay, torch.rand(HEADS, n, generator=gen).double())


def transition_and_state(tokens, kind):
    """T and H, by the recurrence: with values of zero from the identity, and from zero."""
    v, k = tokens.v.shape[-1], tokens.k.shape[-1]
    state = tokens.run(torch.zeros(HEADS, v, k).double())
    if kind == "mamba":
        return tokens.decay.prod(-1), state
    unit = dataclasses.replace(tokens, v=torch.zeros(HEADS, tokens.v.shape[1], k).double())
    return unit.run(torch.eye(k).double().expand(HEADS, k, k)), state


@dataclasses.dataclass
class Batch:
    """Arguments of the op, and the states that it must write, in float64."""

    arguments: dict
    before: torch.Tensor
    last: torch.Tensor


def make_batch(kind, dtype, v, k, seed=0):
    """Rows of chunks and pieces in any order, from a saved state or zero; wide slots hold H over T where it is a
    matrix. Outputs, and whatever no row lists, are NaN."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = rng.sample(range(7), 4)
    chunks = {slot: draw(kind, n, v, k, gen) for slot, n in zip(slots, (40, 1, 17, 3), strict=True)}
    a, b, c, d = slots
    rows = [
        (2, ["new", a, b, "new", c, "new"]), (-1, [d, c, a, "new"]), (-1, []), (0, [a, "new", a, a, "new"]),
        (-1, ["new"]), (1, [c, a]), (3, []),
    ]  # fmt: skip
    num_pieces = sum(row.count("new") for _, row in rows)
    numbers = rng.sample(range(num_pieces + 2), num_pieces)  # in any order, two are in no row
    saved = torch.randn(4, HEADS, v, k, generator=gen).to(dtype)
    poisoned = lambda *shape: torch.full(shape, NAN, dtype=torch.float64)  # noqa: E731
    matrix = (k, k) if kind == "delta" else ()
    parts, indptr = [], [0]
    before, last = poisoned(num_pieces + 2, HEADS, v, k), poisoned(len(rows), HEADS, v, k)
    of_chunks, of_pieces = (
        (poisoned(n, HEADS, *matrix), poisoned(n, HEADS, v, k)) for n in (len(range(7)), num_pieces + 2)
    )
    for slot, tokens in chunks.items():
        of_chunks[0][slot], of_chunks[1][slot] = transition_and_state(tokens, kind)
    for row, (initial, listed) in enumerate(rows):
        state = saved[initial].double() if initial >= 0 else torch.zeros(HEADS, v, k).double()
        for part in listed:
            if part == "new":
                piece, tokens = numbers.pop(), draw(kind, rng.choice([1, 2, 19]), v, k, gen)
                before[piece] = state
                of_pieces[0][piece], of_pieces[1][piece] = transition_and_state(tokens, kind)
                parts.append(-1 - piece)
            else:
                tokens = chunks[part]
                parts.append(part)
            state = tokens.run(state)
        last[row] = state
        indptr.append(len(parts))
    if kind == "delta":  # as a layer leaves them behind
        wide = torch.cat([of_chunks[1], of_chunks[0]], 2).to(dtype).to(DEVICE)
        of_chunks = (wide[:, :, v:], wide[:, :, :v])
    transitions, states = (x.to(dtype).to(DEVICE) for x in of_chunks)
    pieces = [x.float().to(DEVICE) for x in of_pieces]
    arguments = dict(
        before=torch.full_like(before, NAN, dtype=torch.float32).to(DEVICE),
        last=torch.full_like(last, NAN, dtype=torch.float32).to(DEVICE),
        initial_states=saved.to(DEVICE),
        initial_slots=torch.tensor([initial for initial, _ in rows], device=DEVICE),
        part_indptr=torch.tensor(indptr, dtype=torch.int32, device=DEVICE),
        parts=torch.tensor(parts, dtype=torch.int32, device=DEVICE),
        chunk_transitions=transitions, chunk_states=states, piece_transitions=pieces[0], piece_states=pieces[1],
    )  # fmt: skip
    return Batch(arguments, before, last)


def link(name, *, before, last, initial_states, **given):
    """Run the op on these tensors."""
    rows = StateRows(*(given[field.name] for field in dataclasses.fields(StateRows)))
    pieces = None if given["piece_states"] is None else Effects(given["piece_transitions"], given["piece_states"])
    chunks = Effects(given["chunk_transitions"], given["chunk_states"])
    get_implementation(name).link_states(before, last, initial_states, rows, chunks, pieces)


def error(actual, expected):
    """The largest difference, relative to the largest element. What is NaN must be so in both."""
    actual = actual.cpu().double()
    assert torch.equal(actual.isnan(), expected.isnan())
    return float((actual - expected).nan_to_num().abs().max() / expected.nan_to_num().abs().max())


SHAPES = [("delta", 32, 32), ("delta", 128, 128), ("delta", 40, 24), ("mamba", 16, 32), ("mamba", 64, 256)]
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@all_names
@all_shapes
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_states_are_those_of_the_recurrence(name, shape, dtype):
    """Chunks kept in any dtype cost the rounding of T and H; nothing else is written."""
    batch = make_batch(shape[0], dtype, *shape[1:])
    link(name, **batch.arguments)
    bound = 4 * torch.finfo(dtype).eps + ARITHMETIC
    assert error(batch.arguments["before"], batch.before) <= bound
    assert error(batch.arguments["last"], batch.last) <= bound


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_these_models_remember(shape):
    """Without T the states would be far off, so the tests above see it; transposed, too."""
    batch = make_batch(shape[0], torch.float32, *shape[1:])
    wrong = {"chunk_transitions": torch.zeros_like(batch.arguments["chunk_transitions"])}
    link("torch", **batch.arguments | wrong)
    assert error(batch.arguments["last"], batch.last) > 0.1
    if shape[0] == "delta":
        wrong = {"chunk_transitions": batch.arguments["chunk_transitions"].mT.contiguous()}
        link("torch", **batch.arguments | wrong)
        assert error(batch.arguments["last"], batch.last) > 0.1


def without_pieces(batch):
    """The rows' chunks and their last piece only, which needs no transition."""
    arguments = batch.arguments | dict(last=None, piece_transitions=None, piece_states=None)
    parts, indptr = arguments["parts"].tolist(), arguments["part_indptr"].tolist()
    rows = [parts[begin:end] for begin, end in zip(indptr, indptr[1:], strict=False)]
    rows = [[part for i, part in enumerate(row) if part >= 0 or i == len(row) - 1] for row in rows]
    flat = [part for row in rows for part in row]
    arguments["parts"] = torch.tensor(flat, device=DEVICE)
    arguments["part_indptr"] = torch.tensor([0, *(len(row) for row in rows)], device=DEVICE).cumsum(0).int()
    return arguments


@all_names
@all_shapes
def test_one_piece_behind_the_chunks_needs_no_transition(name, shape):
    """The state before a row's only piece does not depend on the piece."""
    batch = make_batch(shape[0], torch.float32, *shape[1:])
    arguments = without_pieces(batch)
    link(name, **arguments)
    full = make_batch(shape[0], torch.float32, *shape[1:]).arguments | {
        key: arguments[key] for key in ("parts", "part_indptr")
    }
    link("torch", **full)
    assert error(arguments["before"], full["before"].cpu().double()) <= ARITHMETIC
    # and in the row that has no other pieces, it is the recurrence's
    row = batch.arguments["parts"].tolist()[batch.arguments["part_indptr"][1] : batch.arguments["part_indptr"][2]]
    assert error(arguments["before"][~row[-1]], batch.before[~row[-1]]) <= ARITHMETIC


@all_names
@all_shapes
def test_states_may_be_written_where_rows_begin(name, shape):
    """To the slot that a row begins with, and to one with which none does."""
    arguments = make_batch(shape[0], torch.float32, *shape[1:]).arguments
    parts = arguments["parts"][arguments["parts"] >= 0][:4]
    arguments |= dict(last=None, piece_transitions=None, piece_states=None)
    arguments["initial_slots"] = torch.tensor([2, -1, 0], device=DEVICE)
    arguments["part_indptr"] = torch.tensor([0, 3, 5, 7], dtype=torch.int32, device=DEVICE)
    a, b, c, d = parts.tolist()
    arguments["parts"] = torch.tensor([a, b, ~2, c, ~3, d, ~0], device=DEVICE)
    saved = arguments["initial_states"]
    expected = saved.clone()
    link("torch", **arguments | dict(before=expected, initial_states=saved.clone()))
    link(name, **arguments | dict(before=saved))
    assert torch.equal(saved[1], expected[1])
    assert error(saved, expected.cpu().double()) <= ARITHMETIC


@all_names
def test_the_same_call_gives_the_same_bits(name):
    first, second = (make_batch("delta", torch.float32, 32, 32).arguments for _ in range(2))
    link(name, **first)
    link(name, **second)
    assert torch.equal(first["last"], second["last"])


@all_names
def test_no_rows(name):
    arguments = make_batch("delta", torch.float32, 32, 32).arguments
    arguments |= {key: arguments[key][:0] for key in ("last", "initial_slots", "parts")}
    arguments["part_indptr"] = arguments["part_indptr"][:1]
    link(name, **arguments)
    assert arguments["before"].isnan().all()


# By argument, what is wrong with it, and what is named.
MISTAKES = {
    "before": (lambda t: t.long(), "before"),
    "last": (lambda t: t[1:], "last"),
    "initial_states": (lambda t: t[..., :-1], "initial_states"),
    "initial_slots": (lambda t: t.float(), "initial_slots"),
    "part_indptr": (lambda t: t[:-1], "part_indptr"),
    "parts": (lambda t: t[None], "parts"),
    "chunk_transitions": (lambda t: t[:-1], "transitions"),
    "chunk_states": (lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), "states"),
    "piece_transitions": (lambda t: t.to("meta"), "transitions"),
    "piece_states": (lambda t: t[:, :1], "transitions"),
}


@all_names
@pytest.mark.parametrize("argument", MISTAKES)
def test_a_wrong_tensor_is_named(name, argument):
    arguments = make_batch("delta", torch.float32, 32, 32).arguments
    change, named = MISTAKES[argument]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{named}: expected "):
        link(name, **arguments)


@all_names
def test_arguments_that_do_not_go_together(name):
    arguments = make_batch("delta", torch.float32, 32, 32).arguments
    with pytest.raises(ValueError, match="^last: expected None without pieces"):
        link(name, **arguments | dict(piece_states=None, piece_transitions=None))
    with pytest.raises(ValueError, match="^pieces.transitions: expected matrices as of chunks"):
        link(name, **arguments | dict(piece_transitions=arguments["piece_transitions"][:, :, 0, 0].contiguous()))
    few = {each: arguments[each][1:] for each in ("piece_states", "piece_transitions")}
    with pytest.raises(ValueError, match=r"^pieces.states: expected shape \[9, 2, 32, 32\]"):
        link(name, **arguments | few)
    narrow = {each: arguments[each][:, :1] for each in ("chunk_states", "chunk_transitions")}
    with pytest.raises(ValueError, match="^chunks.states: expected shape "):
        link(name, **arguments | narrow)


def test_effects_that_no_kernel_takes():
    wide = make_batch("delta", torch.float32, 16, 136).arguments
    with pytest.raises(ValueError, match="^transitions: expected matrices of up to 128 columns, got 136"):
        Effects(wide["chunk_transitions"], wide["chunk_states"])
    arguments = make_batch("delta", torch.float32, 32, 32).arguments
    gaps = arguments["chunk_states"].repeat_interleave(2, 2)[:, :, ::2]
    with pytest.raises(ValueError, match="^states: expected contiguous matrices, got strides "):
        Effects(arguments["chunk_transitions"], gaps)


BROKEN_RULES = {
    r"initial_slots: expected -1 to 3, got 4 at 0": dict(initial_slots=lambda t: t + 2),
    r"parts: expected -9 to 6, got 7 at \d+": dict(parts=lambda t: torch.where(t == t.max(), 7, t)),
    r"parts: expected -9 to 6, got -10 at \d+": dict(parts=lambda t: torch.where(t == t.min(), -10, t)),
    "parts: expected each piece once, got one twice": dict(parts=lambda t: torch.where(t < 0, -1, t)),
    "part_indptr: expected to ascend": dict(part_indptr=lambda t: t.flip(0)),
    r"parts: without effects of pieces, expected these at the ends of rows only, got one at 0": dict(
        last=lambda t: None, piece_transitions=lambda t: None, piece_states=lambda t: None
    ),
}


@pytest.mark.parametrize("reason", BROKEN_RULES)
def test_the_reference_checks_the_rules_for_parts(reason):
    arguments = make_batch("delta", torch.float32, 32, 32).arguments
    for argument, change in BROKEN_RULES[reason].items():
        arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{reason}"):
        link("torch", **arguments)
