"""Ordinary training loops: the model is graphed, the loop is as it was."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .harness import Run, training


def mlp(run: Run, inputs: int = 8, outputs: int = 3, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, outputs),
    ).to(run.device)


def labelled(run: Run, seed: int, batch: int = 16) -> tuple[Tensor, Tensor]:
    return run.rand(seed, batch, 8), run.ints(seed, 3, batch)


@training()
def adamw_with_a_schedule(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for i in range(10):
        x, y = labelled(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        run.see(loss.item(), schedule.get_last_lr())
    run.see(model, optimizer.state_dict())


@training()
def epochs_over_a_loader_with_a_smaller_last_batch(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    data = TensorDataset(run.rand(0, 40, 8).cpu(), run.ints(0, 3, 40).cpu())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(fast(x.to(run.device)), y.to(run.device))
            loss.backward()
            optimizer.step()
            run.see(loss.item())
        model.eval()
        with torch.no_grad():
            scores = torch.cat([fast(x.to(run.device)) for x, _ in loader])
        run.see(scores)
    run.see(model)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(8) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


@training()
def stochastic_weight_averaging(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    batches = [labelled(run, i) for i in range(4)]
    for epoch in range(4):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(fast(x), y)
            loss.backward()
            optimizer.step()
        if epoch > 0:
            average.update_parameters(model)
            schedule.step()
        run.see(loss, schedule.get_last_lr())
    update_bn([x for x, _ in batches], average, device=run.device)
    run.see(average)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.rnn = nn.LSTM(12, 12, num_layers=2, dropout=0.1)
        self.out = nn.Linear(12, 30)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, state = self.rnn(self.embed(tokens), state)
        return self.out(h), state


@training(refused={"cuda": "OL106"})  # cuDNN's own dropout
def language_model_with_carried_state(run: Run) -> None:
    model = LanguageModel().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zeros = torch.zeros(2, 4, 12, device=run.device)
    state = (zeros, zeros.clone())
    text = run.ints(0, 30, 81, 4)
    for i in range(8):
        x, y = text[10 * i : 10 * i + 10], text[10 * i + 1 : 10 * i + 11]
        state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        logits, state = fast(x, state)
        loss = F.cross_entropy(logits.reshape(-1, 30), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.see(math.exp(min(loss.item(), 20.0)), state)
    run.see(model)


class CharacterModel(nn.Module):
    """Keeps its own hidden state between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 12)
        self.out = nn.Linear(12, 3)
        self.hidden: Tensor | None = None

    def reset(self) -> None:
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12, device=x.device) if self.hidden is None else self.hidden
        h = self.cell(x, h)
        self.hidden = h.detach()
        return self.out(h)


@training()
def state_that_the_model_keeps(run: Run) -> None:
    model = CharacterModel().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(12):
        if i == 8:
            model.reset()
        x, y = labelled(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss, model.hidden)
    run.see(model)


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MiniGPT(nn.Module):
    def __init__(self, vocabulary: int = 40, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attend": Attention(width, dropout=dropout), "mix": Residual(width)})
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block["attend"](x)
            x = block["mix"](x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@training()
def a_small_gpt_with_attention_dropout(run: Run) -> None:
    model = MiniGPT().to(run.device)
    fast = run.graph(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for i in range(8):
        for group in optimizer.param_groups:  # a schedule by hand
            group["lr"] = 3e-3 * min(1.0, (i + 1) / 4)
        ids = run.ints(i, 40, 2, 17)
        _, loss = fast(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.see(loss)
    run.see(model)
