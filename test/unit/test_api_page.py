"""The reference names everything that the code offers, and nothing else."""

import asyncio
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from sglang.srt.entrypoints.openai import protocol

import sglang_lazy
from fakes.server import FakeServer
from sglang_lazy import verify
from sglang_lazy.core import segments
from sglang_lazy.core.config import INFO_ROUTE, PREAMBLE, SALT_HEADER, LazyConfig, flag
from sglang_lazy.core.labels import LABEL_KEYS
from sglang_lazy.entrypoints.chunks import ChunkMethods
from sglang_lazy.policies import POLICIES, get_policy
from sglang_lazy.port.cpu import CPU_SETTINGS
from sglang_lazy.port.serving.chat import ChatRequest, MessagesWithChunks
from sglang_lazy.port.serving.completions import CompletionsRequest
from sglang_lazy.port.serving.http import GenerateRequest
from sglang_lazy.port.serving.messages import MessagesRequest
from sglang_lazy.port.serving.responses import ResponsesRequest
from sglang_lazy.port.serving.usage import extend_protocol
from sglang_lazy.serving.agreement import ENOUGH, GAUGES, WINDOW
from sglang_lazy.serving.blocks import BLOCKS
from sglang_lazy.serving.misses import Misses
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.results import Served, annotated
from sglang_lazy.serving.shadow import COUNTERS
from sglang_lazy.serving.usage import Usage
from sglang_lazy.storage import report

ROOT = Path(__file__).parents[2]
API, HTTP, FLAGS, PYTHON, METRICS, ERRORS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("api", "http", "flags", "python", "metrics", "errors")
)


def section(page, heading):
    return re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page, re.M | re.S)[1]


def tables(text):
    """The tables of a page or of a section, each as rows of cells, without their headers."""
    found = re.findall(r"((?:^\|.*\n)+)", text, re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]] for table in found]


def names(rows):
    return [re.fullmatch("`([^`]*)`", row[0])[1] for row in rows]


def check(rows, expected):
    assert sorted(names(rows)) == sorted(expected)


def test_flags_and_their_defaults():
    rows = sum(tables(FLAGS), [])
    check(rows, [flag(field.name) for field in dataclasses.fields(LazyConfig)])
    for row, field in zip(rows, dataclasses.fields(LazyConfig), strict=True):
        default = {"False": "off", PREAMBLE: "a sentence"}.get(str(field.default), str(field.default))
        assert row[1].strip("`") == default
    for name, value in CPU_SETTINGS.items():
        assert f"`--{name.replace('_', '-')} {value}`" in FLAGS


def test_segments_and_policies():
    check(tables(section(API, "Segments"))[0], {*segments._KEYS, "id", *LABEL_KEYS})
    for kind in segments._KINDS:
        assert f'`"{kind}"`' in section(API, "Segments")
    policies, bases = tables(section(API, "Policies"))
    for name, parameters, _ in policies:
        link = name.strip("`")
        spelled = ":".join(filter(None, [link, parameters.strip("`")]))
        assert str(get_policy(link)) == spelled  # loads those of the other distribution
    check(policies, tuple(POLICIES))
    assert [str(get_policy(link)) for link in names(bases)] == names(bases)


def test_fields_of_requests():
    ours = set(vars(GenerateRequest)["__annotations__"])
    (rows,) = tables(section(HTTP, "`/generate` and `/v1/completions`"))
    check(rows, ours)
    assert {name for name in vars(CompletionsRequest)["__annotations__"] if name[0] != "_"} == ours
    chats = section(HTTP, "`/v1/chat/completions`, `/v1/responses` and `/v1/messages`")
    (rows,) = tables(chats)
    check(rows, MessagesWithChunks.model_fields.keys() | {"cache_salt"})
    for model in (ChatRequest, ResponsesRequest, MessagesRequest):
        assert set(names(rows)) <= model.model_fields.keys()
    assert all(f"`{block}`" in chats for block in BLOCKS)
    assert f"## The header `{SALT_HEADER}`" in HTTP
    assert f"## `{INFO_ROUTE}`" in HTTP


def test_results():
    meta_info, chunk, openai = tables(section(API, "Results"))
    reuse = {"cached_tokens": 3, "cached_tokens_details": {"device": 3, "host": 0, "chunk": 1, "chunk_hits": "1"}}
    result = {"meta_info": {"finish_reason": {"type": "stop"}, **reuse}}

    async def report():
        async def outputs():
            yield result

        request = Served(Plan.of(((0, 1),), get_policy("block")), None, "r", [5, 6], {})
        return [output async for output in annotated(outputs(), request, usage=Usage(), misses=Misses(FakeServer()))]

    asyncio.run(report())
    check(meta_info, result["meta_info"].keys() - {"finish_reason"})
    assert names(chunk) == list(result["meta_info"]["chunks"][0])
    extend_protocol()
    check(openai, ["usage.prompt_tokens_details.chunk_tokens", "sglext.cached_tokens_details.chunk"])
    assert "chunk_tokens" in protocol.PromptTokensDetails.model_fields
    assert "chunk" in protocol.CachedTokensDetails.model_fields


def test_python_names():
    (rows,) = tables(PYTHON)
    check(rows, sglang_lazy.__all__)
    keywords = inspect.getfullargspec(sglang_lazy.Engine.generate).kwonlyargs
    assert keywords == inspect.getfullargspec(sglang_lazy.Engine.async_generate).kwonlyargs
    (engine,) = (row[1] for row in rows if row[0] == "`Engine`")
    assert all(f"`{name}`" in engine for name in keywords)
    assert all(f"`{name}`" in PYTHON for name in verify.__all__)


def test_metrics():
    counters, gauges = tables(section(METRICS, "Metrics of shadow mode"))
    check(counters, [f"sglang_lazy:shadow_{name}_total" for name in COUNTERS])
    check(gauges, [f"sglang_lazy:shadow_{name}" for name in GAUGES])
    for row, (_, labels) in zip(gauges, GAUGES.values(), strict=True):
        assert row[1] == ", ".join(f"`{label}`" for label in labels)
    assert f"the last {WINDOW} answers" in gauges[0][2] and f"from {ENOUGH} answers on" in gauges[1][2]


def test_metrics_of_tiers():
    page = (ROOT / "docs/tiers.md").read_text(encoding="utf-8")
    names = [f"host_{name}_total" for name in report.HOST_COUNTERS]
    names += [f"storage_{name}_total" for name in report.COUNTERS] + ["storage_fetch_seconds"]
    assert set(re.findall(r"`sglang_lazy:(\w+)`", page)) == set(names)


SOURCE = "".join(
    re.sub(r'"\n\s*f?"', "", path.read_text(encoding="utf-8"))  # joins adjacent string literals
    for folder in ("python", "sglang-lazy-policies")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize(
    "message", [m for table in tables(ERRORS) for row in table for m in re.findall("`([^`]+)`", row[-2])]
)
def test_quoted_messages_exist_in_the_code(message):
    """The parts between the page's dots stand in one string of the code, in this order."""
    pieces = [re.escape(piece) for piece in message.split("…") if piece.strip(" :].")]
    assert re.search('[^"\\n]*'.join(pieces), SOURCE), message


def test_methods_of_the_engine_for_chunks():
    public = {name for name in vars(ChunkMethods) if not name.startswith("_")}
    sync = {name for name in public if not name.startswith("async_")}
    assert public == sync | {f"async_{name}" for name in sync}
    page = (ROOT / "docs" / "chunks.md").read_text(encoding="utf-8")
    assert sync == set(re.findall(r"^    engine\.(\w+_chunks?)\(", page, re.M))
