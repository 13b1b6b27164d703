"""What a user does with a bare machine, a clone and these pages: commands as printed, and what they lead to.

Run by `.ci/fresh-root`. Not as printed are the download of our dependencies, which are in /dependencies, and the name
of a model that is neither public nor small, in `install.md` and the compose file.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

DEPENDENCIES = "/dependencies"
sys.path[:0] = ["test", DEPENDENCIES]

# Behind the line that makes them importable.
import yaml  # noqa: E402

from support.pages import fenced, indented, pattern, read, run_python, section, swapped_chunks  # noqa: E402

URL = "http://127.0.0.1:30000"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TINY = "examples/models/tiny-rag --device cpu --max-total-tokens 40000"
"""In place of the model above; without a GPU, a server would take a quarter of the memory."""
LOG = Path("/tmp/server.log")


def shell(command: str, **environment: str) -> str:
    """What a command prints. Exits if it fails."""
    print(f"\n$ {command}", flush=True)
    env = {**os.environ, **environment}
    done = subprocess.run(["bash", "-ec", command], stdout=subprocess.PIPE, text=True, env=env, timeout=900)
    print(done.stdout, flush=True)
    expect(done.returncode == 0, f"it ended with status {done.returncode}")
    return done.stdout


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"not as the page says: {otherwise}")


@contextlib.contextmanager
def serving(command: str) -> Iterator[None]:
    """A server, once it is healthy, until it is asked to end."""
    print(f"\n$ {command} &", flush=True)
    with LOG.open("w") as log:
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=log, stderr=log, start_new_session=True)
    try:
        while not healthy():
            expect(process.poll() is None, f"the server ended\n{LOG.read_text()[-4000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def healthy() -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{URL}/health", timeout=5).status == 200
    return False


def provide(environment: str) -> None:
    """Put into an environment, which is made by a command as printed, what 9 GB of downloads would."""
    (site,) = Path(environment).glob("lib/python3.*/site-packages")
    (site / "dependencies.pth").write_text(DEPENDENCIES + "\n")


def readme() -> None:
    (setup, *_) = indented(section("README.md", "Install"))
    shell(setup, PYTHONPATH=DEPENDENCIES)  # pip finds all there, and installs only the checkout
    provide(".venv")
    server, curl, _on_a_gpu = indented(section("README.md", "First request"))
    with serving(server):
        answer = json.loads(shell(curl))
        expect("1889" in answer["choices"][0]["message"]["content"], "the answer")
        again = json.loads(shell(swapped_chunks(curl)))
        expect(again["usage"]["prompt_tokens_details"]["chunk_tokens"] > 40, "both chunks are reused")
        expect("<title>" in urllib.request.urlopen(f"{URL}/lazy", timeout=60).read().decode(), "the page")


def tutorial() -> None:
    page = read("docs/tutorial.md")
    (activate,) = re.findall(r"`(\. \S+/activate)`", page)
    os.environ["PATH"] = shell(f"{activate}; echo $PATH").strip()
    (_, server), *blocks = fenced(page)
    names: dict = {}
    printed = ""
    with serving(server):
        for kind, block in blocks:
            if kind == "text":
                expect(re.fullmatch(pattern(block), printed.strip()) is not None, f"{block}\nprinted\n{printed}")
            elif kind == "log":
                time.sleep(1)
                expect(re.search(pattern(block), LOG.read_text()) is not None, f"in the log: {block}")
            else:
                printed = run_python(block, names) if kind == "python" else shell(block)


def install() -> None:
    page = read("docs/install.md")
    _docker, wheels = indented(page.partition("\n## ")[0])
    for line in wheels.splitlines():
        command = line.partition("#")[0].strip().replace(LLAMA, TINY)
        if " serve " in command:
            break
        shell(command)
        if " -m venv " in command:
            provide(command.split()[-1])
    (see,) = indented(section("docs/install.md", "See that it works"))
    with serving(command):
        shell(see)
        _, _, again = shell(see).partition('"chunks":')
        expect('"hit":true' in again.replace(" ", ""), "the second time it is a hit")
        bench, _ = indented(section("docs/benchmarks.md", "Your prompts, your server"))[0].splitlines()
        os.environ["PATH"] = f"/opt/sglang-lazy/bin:{os.environ['PATH']}"
        Path("prompts.jsonl").write_text(read("examples/data/worlds_sample.jsonl"))
        expect("reordered" in shell(bench), "the table")


def compose() -> None:
    """The server of the compose file, as the image's ENTRYPOINT runs it, and what others there ask it for."""
    server = yaml.safe_load(read("deploy/compose.yaml"))["services"]["server"]
    given = {"MODEL": "examples/models/tiny-rag", "ADMIN_API_KEY": "secret"}
    words = [re.sub(r"\$\{(\w+)\S*.*\}", lambda found: given[found[1]], word) for word in server["command"]]
    with serving(shlex.join(["/opt/sglang-lazy/bin/python3", "-m", *words, *TINY.split()[1:]])):
        _, *check = server["healthcheck"]["test"]
        shell(shlex.join(check))
        (config,) = yaml.safe_load(read("examples/monitoring/prometheus.yaml"))["scrape_configs"]
        (target,) = config["static_configs"][0]["targets"]
        expect("sglang_lazy" in shell(f"curl -s http://{target}{config.get('metrics_path', '/metrics')}"), "metrics")


if __name__ == "__main__":
    for step in (readme, tutorial, install, compose):
        begin = time.monotonic()
        step()
        print(f"\n{step.__name__}: as printed, in {time.monotonic() - begin:.0f} s", flush=True)
