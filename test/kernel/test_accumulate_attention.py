"""accumulate_attention: every implementation against the formula in fp64, and the formula's own properties."""

import dataclasses
import importlib

import pytest
import torch
from cases import all_dtypes, skip_unless_supported
from ragged import DEVICE, NAN, Batch, Shape, add_sinks, cap, packed, quantise, random_batch, relative_error

from oracle.linked_attention import naive_accumulate_attention
from sgl_kernel_lazy import get_implementation

implementations = pytest.mark.parametrize("name", ["torch", "triton"])

# name: (seed, Shape, layout or None for a random one)
CASES = {
    "ragged": (0, Shape(bs=4), None),
    "mha, head_dim 128": (
        1, Shape(num_qo_heads=2, head_dim=128, rotary_dim=128, bs=1), [[("text", 6), ("chunk", 2), ("new", 5)]],
    ),
    "group of 4, partial": (2, Shape(num_qo_heads=8, rotary_dim=24, bs=2), None),
    "group of 8, interleaved": (3, Shape(num_qo_heads=8, num_kv_heads=1, is_neox=False, bs=2), None),
    "head_dim 80, partial, interleaved": (4, Shape(head_dim=80, rotary_dim=20, is_neox=False, bs=2), None),
    "head_dim 512": (10, Shape(num_kv_heads=1, head_dim=512, rotary_dim=512, bs=1), None),
    "20 segments": (
        5,
        Shape(num_kv_heads=1, max_chunk_len=20, bs=1),
        [[part for i in range(20) for part in (("chunk", i % 4), ("new", i % 2))]],
    ),
    "chunks with holes": (
        6, Shape(bs=1), [[("chunk", (2, (0, 1, 2, 5, 9, 39))), ("text", 3), ("chunk", (2, (7, 8))), ("new", 4)]],
    ),
    "behind a preamble": (
        7, Shape(rotary_dim=40, preamble=50, bs=1), [[("chunk", 2), ("text", 9), ("chunk", 1), ("new", 5)]],
    ),
    "many query rows": (8, Shape(num_qo_heads=8, num_kv_heads=1, bs=1), [[("chunk", 2), ("new", 40)]]),
    "plain requests": (9, Shape(bs=3), [[("new", 40)], [("text", 70), ("new", 9)], []]),
}  # fmt: skip
INTERPRETED_IN_FP16 = ("group of 4, partial", "behind a preamble")


def arguments(batch: Batch) -> dict:
    """Tensor arguments: of each three requests' new rows, the first half, all, and none.

    Thus some KV tokens are newer than all queries, and the queries are not the last tokens of their rows.
    """
    begins, lengths = batch.extend["qo_indptr"][:-1].tolist(), batch.extend["qo_indptr"].diff().tolist()
    counts = [(-(-n // 2), n, 0)[b % 3] for b, n in enumerate(lengths)]
    rows = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, counts, strict=True)]).to(DEVICE)
    inputs = dict(batch.extend)
    inputs["qo_indptr"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    return inputs | {argument: inputs[argument][rows] for argument in ("q", "q_positions")}


def new_sums(batch: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros for all KV tokens of the batch, followed by NaN."""
    sums = torch.full(batch.extend["kv_positions"].shape, NAN, dtype=dtype, device=DEVICE)
    sums[: int(batch.extend["kv_indptr"][-1])] = 0
    return sums


def run(name: str, batch: Batch, sums: torch.Tensor | None = None, **given) -> torch.Tensor:
    """The sums of an implementation.  given: arguments that replace the batch's."""
    sums = new_sums(batch) if sums is None else sums
    inputs = arguments(batch)
    max_extend_len = int(inputs["qo_indptr"].diff().max())
    options = {**inputs, **batch.options, "max_extend_len": max_extend_len, **given}
    assert get_implementation(name).accumulate_attention(sums, **packed(**options)) is None
    return sums


def naive(batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """The sums of the formula in this dtype."""
    sums = new_sums(batch, dtype)
    inputs = {argument: tensor for argument, tensor in arguments(batch).items() if argument != "v_cache"}
    naive_accumulate_attention(sums, **inputs, **batch.options)
    return sums


def by_request(batch: Batch, sums: torch.Tensor) -> list[torch.Tensor]:
    """The sums of each request; what follows the last one must be unchanged."""
    *requests, behind = sums.tensor_split(batch.extend["kv_indptr"][1:].cpu().long())
    assert behind.isnan().all() and len(behind)
    return requests


def worst_error(batch: Batch, sums: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error of a request's sums; NaN fails any bound."""
    pairs = zip(by_request(batch, sums), by_request(batch, exact), strict=True)
    return torch.tensor([relative_error(*pair) for pair in pairs]).max().item()


def check(name: str, batch: Batch, **given) -> None:
    """The error is at most twice that of plain PyTorch in the same dtype, both against the formula in fp64.

    With few rows plain PyTorch may be exact by luck, so the rounding of one weight is always allowed.
    """
    exact = naive(batch, torch.float64)
    budget = max(torch.finfo(batch.shape.dtype).eps, worst_error(batch, naive(batch, batch.shape.dtype), exact))
    before = {argument: tensor.clone() for argument, tensor in batch.extend.items()}
    sums = run(name, batch, **given)
    assert worst_error(batch, sums, exact) <= 2 * budget
    for argument, tensor in batch.extend.items():
        assert torch.equal(tensor.nan_to_num(), before[argument].nan_to_num()), f"{argument} was changed"


@implementations
@all_dtypes
@pytest.mark.parametrize("case", CASES)
def test_accumulate_attention(name, dtype, case):
    skip_unless_supported(name, dtype, case, INTERPRETED_IN_FP16)
    seed, shape, layout = CASES[case]
    check(name, random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout))


@implementations
@pytest.mark.parametrize("case", ["ragged", "group of 8, interleaved", "plain requests"])
def test_sinks(name, case):
    seed, shape, layout = CASES[case]
    check(name, add_sinks(random_batch(seed, shape, layout)))


@implementations
@pytest.mark.parametrize("case", ["ragged", "group of 8, interleaved", "plain requests"])
def test_logit_caps(name, case):
    seed, shape, layout = CASES[case]
    check(name, cap(add_sinks(random_batch(seed, shape, layout))))


@implementations
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_caches(name, fp8):
    seed, shape, layout = CASES["group of 4, partial"]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=torch.float16), layout)
    quantised = quantise(batch, fp8, k_scale=2.0)
    check(name, batch, **quantised)


def test_triton_does_not_widen_fp8_to_float64():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="k_cache: expected dtype torch.float32, got torch.float8"):
        run("triton", batch, **quantise(batch, torch.float8_e5m2))


@implementations
def test_two_runs_give_the_same_bits(name):
    batch = random_batch(0)
    assert torch.equal(run(name, batch).nan_to_num(), run(name, batch).nan_to_num())


@implementations
def test_every_row_and_head_adds_one(name):
    """The sums over a request's KV tokens grow by its number of query rows times heads."""
    batch = random_batch(5, Shape(bs=4))
    once = run(name, batch)
    given = arguments(batch)["qo_indptr"].diff() * batch.shape.num_qo_heads
    got = torch.stack([sums.sum() for sums in by_request(batch, once)])
    assert (got - given).abs().max() < 1e-4
    assert 0 in given and (given > 0).sum() > 1
    assert torch.equal(run(name, batch, once.clone()).nan_to_num(), 2 * once.nan_to_num())


@implementations
def test_a_row_that_sees_nothing_adds_nothing(name):
    batch = random_batch(0, Shape(bs=1), [[("gap", 5), ("chunk", 1), ("new", 6)]])
    expected = run(name, batch)
    inputs = arguments(batch)
    rows = torch.tensor([0, 0, 1, 2], device=DEVICE)  # the first row again, before every KV token
    inputs.update(q=inputs["q"][rows], q_positions=inputs["q_positions"][rows])
    inputs["q_positions"][0] = 4
    inputs["qo_indptr"] = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    sums = run(name, batch, **inputs, max_extend_len=4)
    assert worst_error(batch, sums, expected) < 1e-6
    inputs["q_positions"].fill_(0)
    assert run(name, batch, **inputs, max_extend_len=4).nan_to_num().count_nonzero() == 0


@implementations
@pytest.mark.parametrize("num_indices", [0, 5])
def test_queries_without_kv_tokens(name, num_indices):
    batch = random_batch(0)
    none = {argument: torch.zeros_like(batch.extend[argument]) for argument in ("kv_indptr", "num_segments")}
    sums = run(name, batch, **none, kv_indices=batch.extend["kv_indices"][-5:][:num_indices])
    assert sums.nan_to_num().count_nonzero() == 0


@implementations
@pytest.mark.parametrize("layout", [[[], []], [[("text", 5)], [("chunk", 2)]]], ids=["empty rows", "no queries"])
def test_nothing_to_add(name, layout):
    batch = random_batch(0, Shape(bs=2), layout)
    assert run(name, batch).nan_to_num().count_nonzero() == 0


@implementations
def test_text_may_be_in_any_order(name):
    batch = random_batch(0, Shape(bs=1), [[("chunk", 2), ("text", 30), ("new", 9)]])
    text = int(batch.extend["segment_ends"][0, 0])
    order = torch.arange(len(batch.extend["kv_positions"]), device=DEVICE)
    order[text : text + 39] = order[text : text + 39].flip(0)
    sums = run(name, batch, **{argument: batch.extend[argument][order] for argument in ("kv_indices", "kv_positions")})
    assert worst_error(batch, sums, run(name, batch)[order]) < 1e-6


@implementations
def test_strided_rows(name):
    batch = random_batch(0)
    expected = run(name, batch)
    q, keys = arguments(batch)["q"], batch.extend["k_cache"]
    wide_q, wide_keys = (torch.full((len(t), 2 * t.shape[1], 64), NAN, device=DEVICE) for t in (q, keys))
    wide_q[:, : q.shape[1]], wide_keys[:, : keys.shape[1]] = q, keys
    sums = run(name, batch, q=wide_q[:, : q.shape[1]], k_cache=wide_keys[:, : keys.shape[1]])
    assert torch.equal(sums.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("num_splits", [2, 8])
def test_any_number_of_splits(monkeypatch, num_splits):
    """Splits end inside segments, inside the text, and past the end of a row."""
    module = importlib.import_module("sgl_kernel_lazy.triton.accumulate_attention")
    monkeypatch.setattr(module, "_num_splits", lambda *sizes: num_splits)
    linked = [("text", 7), ("chunk", 2), ("new", 3), ("chunk", 2), ("new", 9)]
    check("triton", random_batch(0, Shape(bs=2), [linked, [("new", 20)]]))


def test_the_reference_takes_many_rows_in_steps(monkeypatch):
    module = get_implementation("torch")
    batch = random_batch(7)
    whole = run("torch", batch)
    monkeypatch.setattr(module, "MAX_SCORES", 1)
    assert worst_error(batch, run("torch", batch), whole) < 1e-6


MISTAKES = {
    "sums": lambda t: t.double(),
    "q": lambda t: t.long(),
    "k_cache": lambda t: t[0],
    "qo_indptr": lambda t: t[1:],
    "q_positions": lambda t: t.float(),
    "kv_positions": lambda t: t.long(),
    "segment_ends": lambda t: t[0],
    "cos_sin_cache": lambda t: t.bfloat16(),
    "max_extend_len": lambda n: None,
    "sm_scale": lambda scale: -scale,
    "window": lambda _: 8,
}


@implementations
@pytest.mark.parametrize("argument", MISTAKES)
def test_errors_name_the_argument(name, argument):
    batch = random_batch(0)
    given = dict(arguments(batch), sums=new_sums(batch), max_extend_len=3, sm_scale=1.0, window=None)
    with pytest.raises(ValueError, match=f"^{argument}: expected .*, got "):
        run(name, batch, **{argument: MISTAKES[argument](given[argument])})
