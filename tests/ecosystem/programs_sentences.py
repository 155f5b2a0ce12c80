"""Embeddings with sentence-transformers: the transformer inside is graphed."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

from .harness import Run, inference
from .programs_transformers import TEXT, made


def sentence_model(run: Run) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
        made(run, "Bert", "BertModel", **TEXT).save_pretrained(folder)
        layers = [Transformer(folder, max_seq_length=32), Pooling(32), Normalize()]
    return SentenceTransformer(modules=layers, device="cpu").to(run.device)


@inference(replays=12, recordings=3)
def texts_of_three_lengths_encoded(run: Run) -> None:
    model = sentence_model(run)
    model[0].model = run.graph(model[0].model)
    draw = random.Random(0)
    lengths = [3, 7, 12] * 8
    texts = [" ".join(f"w{draw.randrange(60)}" for _ in range(length)) for length in lengths]
    for _ in range(4):
        run.see(model.encode(texts, batch_size=4, convert_to_tensor=True, show_progress_bar=False))
