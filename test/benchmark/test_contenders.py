"""Names of contenders and models."""

import pytest

from benchmark.serving.contenders import CONTENDERS, contender, parse_contenders, server_of
from benchmark.serving.models import model_name


def test_order():
    """Contenders of one server are adjacent, in whatever order they were named."""
    assert parse_contenders("lazy,stock,lazy-plain,lazy") == ["lazy", "lazy-plain", "stock"]


def test_a_second_server_of_one_kind():
    assert server_of("stock") == server_of("stock") != server_of("stock-again")


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown contender 'vllm': expected one of stock"):
        parse_contenders("stock,vllm")
    with pytest.raises(ValueError, match="unknown model 'llama': expected one of llama-3.1-8b"):
        model_name("llama")
    assert model_name("./here") == "./here"


def test_policies():
    """They share a server, and each sends its own link."""
    names = parse_contenders("lazy@base+epic:tokens=4,stock,lazy,lazy@block")
    assert names == ["lazy@base+epic:tokens=4", "lazy", "lazy@block", "stock"]
    names_with_parameters = "lazy@query:ratio=0.2,static=0.1,lazy@block"
    assert parse_contenders(names_with_parameters) == ["lazy@query:ratio=0.2,static=0.1", "lazy@block"]
    segments = [{"type": "chunk", "input_ids": [1]}, {"type": "text", "input_ids": [3]}]
    assert contender(names[0]).form(segments) == {"segments": segments, "link": "base+epic:tokens=4"}
    with pytest.raises(ValueError, match="link must be one of"):
        parse_contenders("lazy@half")


def test_forms_of_prompts():
    """Only servers with chunk reuse are sent chunks."""
    segments = [{"type": "chunk", "input_ids": [1, 2]}, {"type": "text", "input_ids": [3]}]
    for known in CONTENDERS.values():
        prompt = known.form(segments)
        assert prompt in ({"input_ids": [1, 2, 3]}, {"segments": segments})
        assert "segments" not in prompt or "lazy" in known.server.module
