"""Servers with a host tier and storage behind it, and an oracle for their answers."""

import contextlib
import re

import requests
import torch

from fakes.hostile_storage import FAULTS
from oracle.block_mask import Oracle
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

NUM_TOKENS = 4
TOLERANCE = 1e-4  # of a log-probability
TIERS = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "1000"]


class Server:
    """A server at `url` over the storage in `folder`, with prompts of its own and its model's oracle."""

    def __init__(self, url, folder, oracle):
        self.url, self.folder, self.oracle = url, folder, oracle

    def ask(self, prompt, **options):
        body = {
            "segments": [segment.to_request() for segment in prompt],
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
        return requests.post(f"{self.url}/generate", json=body, timeout=60, **options)

    def answer(self, prompt):
        """Ask a prompt, whose answer must be the oracle's; returns the report on it."""
        answer = self.ask(prompt)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["output_ids"]
        meta = answer.json()["meta_info"]
        expected = self.oracle.logprobs(prompt, tokens[:-1])
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert len(tokens) == NUM_TOKENS and (chosen - reported).abs().max() <= TOLERANCE
        assert (expected.amax(-1) - chosen).max() <= TOLERANCE
        return meta

    def hits(self, prompt):
        return [entry["hit"] for entry in self.answer(prompt)["chunks"]]

    def fault(self, name):
        assert name in FAULTS
        (self.folder / "fault").write_text(name)

    def flush(self):
        assert requests.post(f"{self.url}/flush_cache?timeout=30", timeout=60).ok

    def metric(self, name, **labels):
        """The sum of a metric's samples that have these labels."""
        lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", requests.get(f"{self.url}/metrics").text, re.M)
        asked = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in lines if all(each in found for each in asked))

    def state(self):
        (state,) = requests.get(f"{self.url}/server_info", timeout=10).json()["internal_states"]
        return state["lazy_storage"]

    def stored(self, count):
        """Wait until storage has this many objects."""
        assert wait_for(lambda: len(list(self.folder.glob("*.bin"))) >= count)


@contextlib.contextmanager
def started(tiny_model, folder, tmp_path, *flags):
    log = tmp_path / f"server-{len(list(tmp_path.glob('*.log')))}.log"
    flags = ["--model-path", tiny_model, *TIERS, *flags, *device_flags(), "--enable-metrics"]
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    with running_server(flags, log, environment=variables) as url:
        yield Server(url, folder, Oracle(tiny_model))


def prompt_of(dice, chunks):
    return [dice.text(3), *chunks, dice.text(5)]
