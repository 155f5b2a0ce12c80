"""Models with a line that cannot be captured, in pieces: `on_refusal="split"`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, TopKPooling, global_mean_pool

from .harness import Run, inference, training

transformers.logging.set_verbosity_error()

PIECES: dict[str, Any] = {"warns": ("OL308", "OL311"), "recordings": 40}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


class Nodes(nn.Module):
    """Two convolutions over a graph, and a head."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x, edge_index)))
        return self.head(self.second(x, edge_index))


def classify(run: Run, model: Any) -> None:
    """Train on graphs whose self-loops differ from step to step, then test."""
    model = model.to(run.device)
    fast = run.graph(model, on_refusal="split", warmup=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    y = run.ints(0, 3, 24)
    for i in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(run.rand(i, 24, 8), run.ints(i, 24, 2, 80)), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    model.eval()
    with torch.no_grad():
        for i in range(8):
            run.see(fast(run.rand(i, 24, 8), run.ints(i, 24, 2, 80)))
    run.see(model)


@training(**PIECES)
def gcn_with_self_loops_in_pieces(run: Run) -> None:
    classify(run, Nodes(GCNConv(8, 16), GCNConv(16, 16)))


@training(**PIECES)
def gat_with_self_loops_in_pieces(run: Run) -> None:
    classify(run, Nodes(GATConv(8, 8, heads=2), GATConv(16, 16)))


@inference(**PIECES)
def top_k_pooling(run: Run) -> None:
    """As many edges are left as the scores say."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.pool, self.after = SAGEConv(8, 16), TopKPooling(16), SAGEConv(16, 8)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            x = F.relu(self.before(x, edge_index))
            x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
            return global_mean_pool(self.after(x, edge_index), batch)

    fast = run.graph(Pooled().to(run.device).eval(), on_refusal="split", warmup=1)
    batch = torch.arange(2).repeat_interleave(12).to(run.device)
    with torch.no_grad():
        for i in range(12):
            run.see(fast(run.rand(i, 24, 8), run.ints(i, 12, 2, 40), batch))


def llava(run: Run) -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **vision, num_attention_heads=2, image_size=16, patch_size=8
        ),
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_index=99,
    )
    return transformers.LlavaForConditionalGeneration(config).to(run.device)


def prompt(run: Run, i: int) -> dict[str, Tensor]:
    """Four places for the patches of an image, then text."""
    ids = run.ints(i, 90, 2, 9, low=3)
    ids[:, 1:5] = 99
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": run.rand(i, 2, 3, 16, 16),
    }


@inference(**PIECES)
def an_image_and_text(run: Run) -> None:
    """The places of the image's tokens are counted on the host."""
    fast = run.graph(llava(run).eval(), on_refusal="split", warmup=1)
    with torch.no_grad():
        for i in range(12):
            run.see(fast(**prompt(run, i), use_cache=False).logits)


@training(**PIECES)
def an_image_and_text_in_training(run: Run) -> None:
    model = llava(run)
    fast = run.graph(model, on_refusal="split", warmup=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(12):
        optimizer.zero_grad()
        batch = prompt(run, i)
        loss = fast(**batch, labels=batch["input_ids"].clamp(max=98), use_cache=False).loss
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@inference(**PIECES)
def patches_chosen_by_a_mask(run: Run) -> None:
    """ViLT reads on the host which patches an image has."""
    config = transformers.ViltConfig(**TEXT, image_size=32, patch_size=8, max_image_length=-1)
    fast = run.graph(
        transformers.ViltModel(config).to(run.device).eval(), on_refusal="split", warmup=1
    )
    ones = torch.ones(2, 32, 32, dtype=torch.long, device=run.device)
    with torch.no_grad():
        for i in range(12):
            ids = run.ints(i, 90, 2, 8, low=3)
            out = fast(input_ids=ids, pixel_values=run.rand(i, 2, 3, 32, 32), pixel_mask=ones)
            run.see(out.last_hidden_state, out.pooler_output)


@training(**PIECES)
def layers_dropped_by_chance(run: Run) -> None:
    """Wav2Vec2 masks time by NumPy's generator, and drops layers by torch's on the host."""
    config = transformers.Wav2Vec2Config(
        **{**TEXT, "vocab_size": 20, "num_hidden_layers": 3},
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.3,
        mask_time_length=2,
        mask_time_prob=0.2,
    )
    model = transformers.Wav2Vec2ForCTC(config).to(run.device).train()
    fast = run.graph(model, on_refusal="split", warmup=1)
    heard = torch.ones(2, 400, dtype=torch.long, device=run.device)
    for i in range(12):
        model.zero_grad()
        logits = fast(input_values=run.rand(i, 2, 400), attention_mask=heard).logits
        logits.square().sum().backward()
        run.see(logits, [p.grad for p in model.parameters() if p.grad is not None])
