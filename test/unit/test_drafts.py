"""What the model that drafts reads: the tokens of its prefills, the rows of its passes, its graphs."""

import dataclasses
from array import array
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kernel_lazy import get_implementation
from sglang_lazy.attention.decode_rows import DecodeRows, StepRows
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.model import AttentionLayer, LayerRope, ServedModel
from sglang_lazy.core.row_order import FillRow
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.port import graphs
from sglang_lazy.port.model import drafts

pytestmark = pytest.mark.usefixtures("sglang_context")


def fill(parts, cached, preamble=()):
    """A request that computes chunks of these tokens, of whose first ones so many are cached."""
    key = SimpleNamespace(namespace=SimpleNamespace(leading=None))
    chunks = [SimpleNamespace(tokens=array("q", part), preamble=array("q", preamble), key=key) for part in parts]
    state = Fill(chunks, owner=None)
    state.row = FillRow([len(part.tokens) for part in state.parts], cached, bool(preamble))
    return SimpleNamespace(lazy=state)


def in_row(parts, cached):
    """The (part, index) of each token of a fill's row: all cached beginnings, then the rest of each part."""
    beginnings = [(i, j) for i, count in enumerate(cached) for j in range(count)]
    return beginnings + [(i, j) for i, part in enumerate(parts) for j in range(cached[i], len(part))]


@pytest.mark.parametrize("cached", [[0, 0, 0], [2, 0, 1], [0, 3, 0]])
def test_a_chunk_is_followed_by_its_own_beginning(cached):
    """So the KV of its last token does not depend on what else the fill computes."""
    parts = [[11, 12, 13], [21, 22, 23, 24], [31, 32]]
    expected = [parts[i][(j + 1) % len(parts[i])] for i, j in in_row(parts, cached)]
    assert list(drafts.tokens_after(fill(parts, cached))) == expected
    alone = [token for part in parts for token in drafts.tokens_after(fill([part], [0]))]
    assert list(drafts.tokens_after(fill(parts, [0, 0, 0]))) == alone


def test_a_preamble_is_followed_by_itself():
    parts = [[1, 2], [11, 12, 13]]
    expected = [parts[i][(j + 1) % len(parts[i])] for i, j in in_row(parts, [0, 1])]
    assert list(drafts.tokens_after(fill(parts[1:], [0, 1], preamble=parts[0]))) == expected


def linked(order, tokens, output=()):
    """A linked request whose row has its tokens, by position, in this order."""
    state = LinkedRequest.__new__(LinkedRequest)
    state.row = SimpleNamespace(permuted=lambda ids: array("q", [ids[position] for position in order]))
    return SimpleNamespace(lazy=state, origin_input_ids=array("q", tokens), output_ids=array("q", output))


def test_text_is_followed_by_the_prompts_next_token():
    order = [2, 3, 0, 1, 4, 5]
    following = drafts.tokens_after(linked(order, [50, 51, 52, 53], output=[54, 55]))
    assert list(following) == [53, 54, 51, 52, 55, drafts.UNKNOWN]


CONFIG = {"model_config": SimpleNamespace(vocab_size=800)}


def test_what_stands_for_an_image_is_not_read():
    batch = SimpleNamespace(
        reqs=[linked([0, 1, 2], [50, 1 << 40, 52])], prefix_lens=[0], extend_lens=[2], forward_mode=ForwardMode.EXTEND
    )
    forward_batch = SimpleNamespace(input_ids=torch.tensor([900, 901]))
    pool = SimpleNamespace(segment_table=SimpleNamespace(has_chunks=True))
    drafts.follow_prompts(
        forward_batch, None, batch, SimpleNamespace(is_draft_worker=True, req_to_token_pool=pool, **CONFIG)
    )
    assert forward_batch.input_ids.tolist() == [900, 52]


def test_a_prefill_reads_following_tokens():
    """Of the part of each row that it computes; SGLang's own where a prompt ends, and for prompts without chunks."""
    reqs = [linked([2, 3, 0, 1], [50, 51, 52, 53]), SimpleNamespace(), fill([[11, 12, 13]], [0])]
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[2, 0, 1], extend_lens=[2, 3, 2], forward_mode=ForwardMode.EXTEND)
    forward_batch = SimpleNamespace(input_ids=torch.arange(900, 907))
    table = SimpleNamespace(has_chunks=True)
    runner = SimpleNamespace(is_draft_worker=True, req_to_token_pool=SimpleNamespace(segment_table=table), **CONFIG)
    drafts.follow_prompts(forward_batch, None, batch, runner)
    assert forward_batch.input_ids.tolist() == [51, 52, 902, 903, 904, 13, 11]
    for change in ({"is_draft_worker": False}, {"req_to_token_pool": SimpleNamespace()}):
        forward_batch.input_ids = given = torch.arange(900, 907)
        drafts.follow_prompts(forward_batch, None, batch, SimpleNamespace(**{**vars(runner), **change}))
        assert forward_batch.input_ids is given


def test_a_prefill_reads_the_last_token_that_sglang_has():
    batch = SimpleNamespace(
        reqs=[linked([1, 0, 2], [50, 51, 52])], prefix_lens=[1], extend_lens=[2], forward_mode=ForwardMode.EXTEND
    )
    forward_batch = SimpleNamespace(input_ids=torch.tensor([900, 901]))
    pool = SimpleNamespace(segment_table=SimpleNamespace(has_chunks=True))
    drafts.follow_prompts(
        forward_batch, None, batch, SimpleNamespace(is_draft_worker=True, req_to_token_pool=pool, **CONFIG)
    )
    assert forward_batch.input_ids.tolist() == [51, 901]


# Passes and graphs


def test_a_model_that_the_link_path_cannot_serve_reads_chunks_as_they_are(monkeypatch, caplog):
    """SGLang's attention stays, and the log says why."""
    monkeypatch.setattr(drafts, "unfit_layers", lambda *_, **__: ["no rotation"])
    given = table()
    runner = SimpleNamespace(
        model=None, req_to_token_pool=SimpleNamespace(segment_table=given), token_to_kv_pool=SimpleNamespace()
    )
    drafts.read_chunks(None, SimpleNamespace(draft_runner=runner))
    assert given.drafter is runner and given.model.draft is None and "fewer are accepted: no rotation" in caplog.text


@pytest.mark.parametrize(("window", "fits"), [(None, True), (24, True), (16, False)])
def test_a_draft_reads_what_the_model_keeps_for_its_own_windows(window, fits, monkeypatch, caplog):
    """What a row lists of its end is as long as the longest window of the model."""
    layer = AttentionLayer(1, 1, 32, LayerRope(torch.zeros(16), 8, True, "cpu"), window, kernels=Mock())
    given = SegmentTable(4, 1, "cpu", ServedModel({}, {0: dataclasses.replace(layer, window=24)}))
    monkeypatch.setattr(drafts, "unfit_layers", lambda *_, **__: [])
    monkeypatch.setattr(drafts, "describe_layers", lambda *_: {3: layer})
    monkeypatch.setattr(drafts, "check_layers", lambda _model, layers, *_: layers)
    monkeypatch.setattr(drafts, "choose_kernels", lambda _config, layers, *_: layers)
    wrapped = []
    monkeypatch.setattr(drafts, "with_link_path", lambda backend, *_: wrapped.append(backend))
    pool = SimpleNamespace(get_kv_buffer=lambda layer_id: f"KV of layer {layer_id}")
    runner = SimpleNamespace(
        model=SimpleNamespace(kv_context=SimpleNamespace(target_token_to_kv_pool=pool)),
        model_config=SimpleNamespace(context_len=8, hidden_size=32),
        req_to_token_pool=SimpleNamespace(segment_table=given),
        **{"device": "cpu", "dtype": torch.float32, "kv_cache_dtype": torch.float32},
    )
    drafts.read_target(None, SimpleNamespace(draft_runner=runner, draft_attn_backend="its attention"))
    assert given.drafter is None, "it has no KV that belongs to a chunk"
    assert wrapped == (["its attention"] if fits else []) and ("have windows" in caplog.text) == (not fits)
    assert (given.model.draft and given.model.draft.kv_buffers) == ({3: "KV of layer 3"} if fits else None)


def test_window_layers_of_a_draft_with_a_host_tier():
    """It copies slots of one numbering."""
    flags = SimpleNamespace(enable_hierarchical_cache=True)
    pools = {
        "req_to_token_pool": SimpleNamespace(segment_table=table()),
        "token_to_kv_pool": SWAKVPool.__new__(SWAKVPool),
    }
    with pytest.raises(ValueError, match="--enable-hierarchical-cache"):
        drafts.read_chunks(None, SimpleNamespace(draft_runner=SimpleNamespace(server_args=flags, **pools)))


def test_sglangs_host_tier_takes_drafts_where_there_is_one():
    taken = []
    for cache in (SimpleNamespace(cache_controller=None), SimpleNamespace(cache_controller=object())):
        drafts.copy_to_host(lambda **given: taken.append(given), tree_cache=cache, draft_plan="plan")
    assert taken == [{"tree_cache": cache, "draft_plan": "plan"}]


def table():
    layer = AttentionLayer(1, 1, 32, LayerRope(torch.zeros(16), 8, True, "cpu"), kernels=get_implementation("torch"))
    return SegmentTable(4, 1, "cpu", ServedModel({}, {0: layer}))


class StockStep:
    def init_forward_metadata(self, _forward_batch):
        self.prepared = True


class StockSteps:
    """SGLang's container of two passes."""

    def __init__(self, given, pool):
        self.attn_backends, self.link_table, self.prepared = [StockStep(), StockStep()], given, 0
        for step in self.attn_backends:
            step.link_decode = DecodeRows(given, pool.req_to_token, given.model)

    def init_forward_metadata(self, _forward_batch):
        self.prepared += 1


class Steps(drafts.LinkSteps, StockSteps):
    """As `read_chunks` makes it."""


def test_each_pass_sees_the_drafts_before_it():
    given, pool = table(), SimpleNamespace(req_to_token=torch.arange(40, dtype=torch.int32).view(4, 10))
    steps = Steps(given, pool)
    batch = SimpleNamespace(
        batch_size=2,
        req_pool_indices=torch.tensor([3, 1]),
        seq_lens=torch.tensor([4, 2]),
        seq_lens_cpu=None,
    )
    steps.init_forward_metadata(batch)
    assert steps.prepared == 1 and all(step.link_planned is None for step in steps.attn_backends)
    with given.running(LinkedBatch()):
        steps.init_forward_metadata(batch)
    assert steps.prepared == 1
    for drafted, step in enumerate(steps.attn_backends, 1):
        ((rows, _),) = step.link_planned.values()
        assert rows.kv_indices.tolist() == [*range(30, 34 + drafted), *range(10, 12 + drafted)]


def test_passes_share_a_workspace_and_plan_as_they_begin():
    """One for the model and all that drafts for it, so each pass plans its rows once, before its first layer, and after
    the passes before it."""
    seen = []
    kernels = Mock(
        decode_workspace=lambda *_, **__: torch.zeros(1),
        plan_decode=lambda workspace, rows, **_: seen.append(("plan", workspace, rows)),
        link_decode=lambda q, _layer, rows, workspace: seen.append(("run", workspace, rows)) or q,
    )
    layer = AttentionLayer(1, 1, 32, LayerRope(torch.zeros(16), 8, True, "cpu"), kernels=kernels)
    given = SegmentTable(4, 1, "cpu", ServedModel({}, {0: layer, 1: layer}))
    given.model.draft = draft = ServedModel({}, {5: layer, 3: layer})
    pool = SimpleNamespace(req_to_token=torch.arange(40, dtype=torch.int32).view(4, 10))
    target = DecodeRows(given, pool.req_to_token, given.model, 3)
    steps = [drafts.LinkStep.__new__(drafts.LinkStep) for _ in range(2)]
    for seq_len, step in enumerate(steps, 4):
        step.link_model, step._prepare = draft, lambda q, *_: (q, None)
        rows = StepRows(1, torch.tensor([2]), torch.tensor([seq_len]), None)
        step.link_planned = DecodeRows(given, pool.req_to_token, draft).unplanned(rows)
    assert not seen
    for step in steps:
        for layer_id in (3, 5):
            step._forward_planned(torch.ones(1, 32), None, None, SimpleNamespace(layer_id=layer_id), None, True, {})
    target.of(rows)
    assert [(what, len(rows.kv_indices)) for what, _, rows in seen] == [
        *[("plan", 4), ("run", 4), ("run", 4)],
        *[("plan", 5), ("run", 5), ("run", 5)],
        ("plan", 5),
    ]
    assert len({id(workspace) for _, workspace, _ in seen}) == len(given.workspaces) == 1


class Launches(TorchDispatchMode):
    """Counts the operations of PyTorch that would launch a kernel on a GPU: all that are no views."""

    VIEWS = ("slice", "view", "select", "alias", "unsqueeze", "expand", "as_strided")

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("queries", [dict(first=1, num_queries=4), dict(first=2), dict(first=-3, num_queries=4), {}])
def test_a_pass_in_a_graph_prepares_its_rows_in_two_launches(queries):
    """One fills them and one plans them, whichever of the passes of a step it is: each has so few layers of its own
    that a dozen small kernels would take longer than they."""
    ops, called = get_implementation("torch"), []
    kernels = Mock(
        decode_workspace=ops.decode_workspace,
        whole_rows=lambda _rows, _tables, queries: called.append(("fill", queries)),
        plan_decode=lambda *_, **__: called.append(("plan", None)),
    )
    layer = AttentionLayer(1, 1, 32, LayerRope(torch.zeros(16), 8, True, "cpu"), kernels=kernels)
    given = SegmentTable(4, 1, "cpu", ServedModel({}, {0: layer}))
    rows = DecodeRows(given, torch.zeros(4, 10, dtype=torch.int32), given.model, 4)
    rows.allocate_for_graphs(8)
    step = StepRows(2, torch.tensor([3, 1]), torch.tensor([4, 2]), None, **queries)
    with Launches() as torch_itself:
        rows.of(step, for_graph=True)
    assert torch_itself.launched == []
    [(_, given), last] = called
    assert (given.first, given.num_queries) == (queries.get("first", 0), queries.get("num_queries", 1))
    assert last == ("plan", None)


def test_queries_of_a_padded_batch():
    """SGLang's graphs are given buffers for their largest batch."""
    rows = StepRows(1, torch.tensor([3, 0]), torch.tensor([7, 1]), None, first=-1, num_queries=2)
    queries = rows.queries
    assert (queries.total, queries.seen(queries.seq_lens).tolist()) == (2, [6, 7])
    assert (queries.places.tolist(), queries.seq_lens.tolist()) == ([3], [7])


def test_requests_that_pad_a_batch_have_tokens():
    """SGLang says that they have one, of which the first query of a draft's extension would see none, or fewer."""
    rows = StepRows(2, torch.tensor([3, 0]), torch.tensor([7, 1]), torch.tensor([7, 1]), first=-3, num_queries=4)
    assert rows.queries.seen(rows.seq_lens_cpu).tolist() == [4, 5, 6, 7, 1, 1, 1, 1]


def test_shapes_are_captured_for_drafts_over_chunks():
    """Under a key of their own, if the model that drafts has the link path."""
    given, seen = table(), []
    graph_runner = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(segment_table=given)))

    def key():
        return graphs.key_of_drafting(lambda _runner, bs: ShapeKey(size=bs), graph_runner, 2)

    def capture(_runner, bs):
        seen.append((key(), graphs.batch_of_graph(given, in_capture=True)))

    graphs.capture_drafting(capture, graph_runner, 2)
    stock, link = (ShapeKey(size=2), None), (ShapeKey(size=2, attention_variant="link"), LinkedBatch())
    assert seen == [stock]
    with given.running(LinkedBatch()):
        assert key() == stock[0]
    given.model.draft = ServedModel({}, {})
    seen.clear()
    graphs.capture_drafting(capture, graph_runner, 2)
    assert seen == [stock, link] and key() == stock[0]
    with given.running(LinkedBatch()):
        assert key() == link[0]
    with given.running(None):
        assert key() == stock[0]
