"""Clients of a server, in a process without torch: requests of mixed sizes, and what came of them.

    python -m tests.ecosystem.clients http://127.0.0.1:8000 expected.json --requests 500 --seed 1

The file has eager's results: a vector for each sentence, and tokens for each prompt. One request in
twenty is not allowed, and one in forty is left by its client as soon as it is sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BAD = (
    ("/embed", b'{"sentences": []}'),
    ("/embed", b'{"sentences": ["fine", ""]}'),
    ("/embed", b'{"sentences": ["fine", 5]}'),
    ("/embed", b'{"sentences": "not a list"}'),
    ("/embed", b'{"sentences": ["cut off'),
    ("/embed", b"{}"),
    ("/generate", b'{"prompt": [1, 2, 99999999]}'),
    ("/generate", b'{"prompt": []}'),
)
TOLERANCE = 1e-5  # what float32 may differ by, as `torch.testing.assert_close` has it
SECONDS = 120.0  # for an answer


@dataclasses.dataclass
class Tally:
    """What came of requests.

    Attributes:
        good: those that had eager's result.
        refused: those that are not allowed, and had a 422.
        left: those that the client left.
        lost: those without an answer, or with one of another status, in words.
        wrong: those with another result, in words.
        slowest: the seconds that an answer took at most.
    """

    good: int = 0
    refused: int = 0
    left: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    slowest: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        sums = [getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)]
        return Tally(*sums[:-1], max(self.slowest, other.slowest))


class Client:
    """One connection after another, each kept as long as the server keeps it."""

    def __init__(self, url: str, expected: dict[str, Any], seed: int) -> None:
        self.address = urlsplit(url).netloc
        self.vectors = list(expected["vectors"].items())
        self.prompts = expected["prompts"]
        self.random = random.Random(seed)
        self.tally = Tally()
        self.connection = self.connect()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=SECONDS)

    def send(self, path: str, body: bytes) -> None:
        """Send a request. A connection that the server closed while it was idle is made anew."""
        for last in (False, True):
            try:
                self.connection.request("POST", path, body, {"Content-Type": "application/json"})
                return
            except (ConnectionError, http.client.CannotSendRequest):
                self.connection.close()
                if last:
                    raise

    def answer(self) -> tuple[int, bytes]:
        response = self.connection.getresponse()
        return response.status, response.read()

    def ask(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        """Send and wait; None, with a note, if there is no answer."""
        started = time.monotonic()
        try:
            self.send(path, body)
            found = self.answer()
        except (OSError, http.client.HTTPException) as error:
            self.tally.lost.append(f"{path}: {type(error).__name__}: {error}")
            self.connection.close()
            return None
        self.tally.slowest = max(self.tally.slowest, time.monotonic() - started)
        return found

    def good(self) -> tuple[str, bytes, Any]:
        """A request that is allowed, and its result."""
        if self.random.random() < 0.05:
            prompt, tokens = self.random.choice(self.prompts)
            return "/generate", json.dumps({"prompt": prompt}).encode(), tokens
        (count,) = self.random.choices(range(1, 9), weights=(8, 4, 2, 1, 1, 1, 1, 1))
        some = self.random.choices(self.vectors, k=count)
        body = json.dumps({"sentences": [sentence for sentence, _ in some]}).encode()
        return "/embed", body, [vector for _, vector in some]

    def check(self, path: str, found: tuple[int, bytes] | None, expected: Any) -> None:
        """Note what came of a request that is allowed."""
        if found is None:
            return
        status, body = found
        if status != 200:
            self.tally.lost.append(f"{path}: {status}: {body[:200]!r}")
            return
        made = json.loads(body)["vectors" if path == "/embed" else "tokens"]
        if made == expected or (path == "/embed" and close(made, expected)):
            self.tally.good += 1
        else:
            self.tally.wrong.append(f"{path}: {str(made)[:100]} is not {str(expected)[:100]}")

    def one(self) -> None:
        """Make one request of any kind."""
        chance = self.random.random()
        if chance < 0.05:
            path, body = self.random.choice(BAD)
            found = self.ask(path, body)
            if found is not None and found[0] == 422:
                self.tally.refused += 1
            elif found is not None:
                self.tally.wrong.append(f"{path} {body!r}: {found}")
            return
        path, body, expected = self.good()
        if chance < 0.075:
            self.send(path, body)
            assert self.connection.sock is not None
            self.connection.sock.shutdown(socket.SHUT_RDWR)
            self.connection.close()
            self.tally.left += 1
            return
        self.check(path, self.ask(path, body), expected)


def close(made: Any, expected: Any) -> bool:
    """Whether nested lists of floats are the same up to the tolerance."""
    if isinstance(expected, list):
        if len(made) != len(expected):
            return False
        return all(close(a, b) for a, b in zip(made, expected, strict=True))
    return abs(made - expected) <= TOLERANCE


def run(url: str, expected: dict[str, Any], requests: int, threads: int, seed: int) -> Tally:
    """Make so many requests, from so many threads with a connection each."""
    clients = [Client(url, expected, seed * 1000 + i) for i in range(threads)]
    left = iter(range(requests))

    def work(client: Client) -> None:
        for _ in left:
            client.one()
        client.connection.close()

    workers = [threading.Thread(target=work, args=(client,)) for client in clients]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum((client.tally for client in clients), Tally())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("expected", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    expected = json.loads(options.expected.read_text())
    tally = run(options.url, expected, options.requests, options.threads, options.seed)
    json.dump(dataclasses.asdict(tally), sys.stdout)


if __name__ == "__main__":
    main()
