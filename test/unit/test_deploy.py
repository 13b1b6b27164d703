"""What `deploy` starts: each file can be read, and its commands have flags that the programs take."""

import argparse
import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_lazy import launch_server
from sglang_lazy.port.plugin import SGLANG_VERSION
from sglang_lazy.routing import __main__ as routing

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = {
    f"{one['kind']} {one['metadata']['name']}": one
    for name in ("workers", "router")
    for one in yaml.safe_load_all((DEPLOY / f"kubernetes/{name}.yaml").read_text())
}


def containers(workload):
    return {each["name"]: each for each in MANIFESTS[workload]["spec"]["template"]["spec"]["containers"]}


def unit():
    """The systemd unit; options keep their case, and specifiers are not interpolated."""
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read_string((DEPLOY / "sglang-lazy.service").read_text())
    return parser


WORKER = containers("StatefulSet sglang-lazy")["server"]
ROUTER = containers("Deployment sglang-lazy-router")
UNIT = unit()


@pytest.mark.parametrize(
    "command",
    [
        COMPOSE["services"]["server"]["command"],
        WORKER["args"],
        shlex.split(UNIT["Service"]["ExecStart"])[2:],
    ],
    ids=["compose", "kubernetes", "systemd"],
)
def test_servers_are_given_flags_that_they_take(command):
    module, *flags = command
    assert module == "sglang_lazy.launch_server"
    _, rest = launch_server.parse_args(flags)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(rest)  # exits at an unknown flag
    assert given.model_path and given.admin_api_key and given.enable_metrics and given.port == 30000


def test_the_router_is_given_flags_that_it_takes():
    """Ours by their parser; smg's are those that docs/routing.md gives reasons for, and where workers are."""
    module, *flags = ROUTER["middleware"]["args"]
    assert module == "sglang_lazy.routing"
    args = routing.parse_args(flags)
    page = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
    program, launch, *flags = ROUTER["smg"]["command"]
    assert (Path(program).name, launch) == ("smg", "launch")
    explained = {re.match(r"--[a-z-]+", row).group() for row in re.findall(r"^\| `(--[^`]+)` \|", page, re.MULTILINE)}
    given = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
    assert given - explained == {"--host", "--port", "--worker-urls"}
    smg = dict(flag.split("=") for flag in flags if "=" in flag)
    assert args.router == f"http://{smg['--host']}:{smg['--port']}"
    assert args.port == ROUTER["middleware"]["ports"][0]["containerPort"]


def test_the_router_knows_every_worker_and_its_clients_find_it():
    workers, service = MANIFESTS["StatefulSet sglang-lazy"]["spec"], MANIFESTS["Service sglang-lazy"]
    assert workers["serviceName"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    urls = [word for word in ROUTER["smg"]["command"] if word.startswith("http")]
    assert urls == [f"http://sglang-lazy-{i}.sglang-lazy:30000" for i in range(workers["replicas"])]
    for service, workload in (
        ("Service sglang-lazy", "StatefulSet sglang-lazy"),
        ("Service sglang-lazy-router", "Deployment sglang-lazy-router"),
    ):
        spec = MANIFESTS[workload]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert MANIFESTS[service]["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
        named = [port["name"] for each in containers(workload).values() for port in each.get("ports", ())]
        assert named == ["http"]
    mounted = {each["name"] for each in WORKER["volumeMounts"]}
    pod = workers["template"]["spec"]["volumes"] + [each["metadata"] for each in workers["volumeClaimTemplates"]]
    assert mounted == {each["name"] for each in pod}


def test_files_that_compose_mounts_are_there():
    mounts = [volume.split(":") for one in COMPOSE["services"].values() for volume in one.get("volumes", ())]
    for source, target, *_ in mounts:
        assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], target
    build = COMPOSE["services"]["server"]["build"]
    assert ((DEPLOY / build["context"]).resolve() / build["dockerfile"]).is_file()
    grafana = COMPOSE["services"]["grafana"]
    assert {each["source"] for each in grafana["configs"]} == COMPOSE["configs"].keys()
    source, dashboards = (yaml.safe_load(COMPOSE["configs"][name]["content"]) for name in ("datasource", "dashboards"))
    path = dashboards["providers"][0]["options"]["path"]
    assert path in [target.rpartition("/")[0] for _, target, *_ in mounts if target.endswith(".json")]
    dashboard = json.loads((ROOT / "examples/monitoring/sglang-lazy-dashboard.json").read_text(encoding="utf-8"))
    (choice,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert choice["query"] == source["datasources"][0]["type"]


def test_prometheus_finds_the_server():
    """It shares the server's network, so that Grafana finds it under the server's name."""
    assert COMPOSE["services"]["prometheus"]["network_mode"] == "service:server"
    config = yaml.safe_load((ROOT / "examples/monitoring/prometheus.yaml").read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:30000"]
    source = yaml.safe_load(COMPOSE["configs"]["datasource"]["content"])
    assert source["datasources"][0]["url"] == "http://server:9090"


def test_the_image_is_of_the_sglang_that_the_plugin_supports():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FROM")][-1] == f"lmsysorg/sglang:v{SGLANG_VERSION}"
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert (
        all((ROOT / name).exists() for name in kept)
        and {"pyproject.toml", "python", "sgl-kernel-lazy", "sglang-lazy-policies"} <= kept
    )
    requirements = (ROOT / "benchmark/routing/requirements.txt").read_text().split()
    (smg,) = [line for line in requirements if line.startswith("smg==")]
    assert smg in (DEPLOY / "Dockerfile").read_text().split()


def test_the_unit_is_whole():
    assert UNIT.sections() == ["Unit", "Service", "Install"]
    assert UNIT["Service"]["Restart"] == "always"  # the server ends itself on faults, docs/operations.md
    words = shlex.split(UNIT["Service"]["ExecStart"])
    told = (DEPLOY / "sglang-lazy.service").read_text()
    assert words[0].startswith("/") and all(
        f"#   {name}=" in told for name in re.findall(r"\$\{(\w+)\}", " ".join(words))
    )
