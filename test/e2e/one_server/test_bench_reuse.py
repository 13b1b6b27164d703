"""`sglang-lazy bench` on a running server: the tokens reused are those of documents that were sent before."""

import collections
import json

import pytest
from transformers import AutoTokenizer

from sglang_lazy import bench

pytestmark = pytest.mark.slow


def test_reuse_is_that_of_documents_sent_before(server, tiny_model, tmp_path, capsys):
    out = tmp_path / "samples.json"
    bench.main(["--url", server, "--count", "5", "--chunks", "3", "--words", "15", "--out", str(out)])
    shown = capsys.readouterr().out.splitlines()
    samples = collections.defaultdict(list)
    for sample in json.loads(out.read_text()):
        assert sample["ttft"] > 0
        samples[sample["phase"], sample["link"]].append(sample)
    assert [line.split()[-5] for line in shown[3:]] == ["block", "full"] * 4
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    seen = set()
    phases = (samples[phase, "block"] for phase in bench.PHASES)
    prompts = bench.made_up(5, 3, 15)
    for prompt, *measured in zip(prompts, *phases, strict=True):
        cold, warm, reordered, turn = (sample["reused"] for sample in measured)
        lengths = {each["text"]: len(tokenizer.encode(each["text"])) for each in prompt if each["type"] == "chunk"}
        text = sum(len(tokenizer.encode(each["text"])) for each in prompt if each["type"] == "text") + 1
        assert cold == 0
        assert all(sum(lengths.values()) <= reused < sum(lengths.values()) + text for reused in (warm, reordered))
        known = sum(length for chunk, length in lengths.items() if chunk in seen)
        assert known <= turn <= known + text
        seen.update(lengths)
    for cold, reordered in zip(samples["cold", "full"], samples["reordered", "full"], strict=True):
        assert cold["reused"] == 0 and reordered["reused"] < 0.3 * reordered["prompt"]


def test_refusals_are_in_the_servers_words(server, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--url", server, "--links", "blokc"])
    assert ended.value.code == 2 and "link must be one of" in capsys.readouterr().err
