"""Ordinary training loops: the model is graphed, the loop is as it was."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
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


@training()
def accumulated_gradients_and_clipping(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(12):
        x, y = labelled(run, i)
        loss = F.cross_entropy(fast(x), y) / 3
        loss.backward()
        if i % 3 == 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            run.see(norm)
        run.see(loss)
    run.see(model, [p.grad for p in model.parameters()])


@training()
def bfloat16_autocast(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(8):
        x, y = labelled(run, i)
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype=torch.bfloat16):
            logits = fast(x)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        run.see(loss, logits)
    run.see(model)


@training()
def half_precision_with_a_scaler(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=3)
    for i in range(9):
        x, y = labelled(run, i)
        if i == 6:
            x = x * 1e6  # overflows half precision: this step is skipped
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype=torch.float16):
            loss = F.cross_entropy(fast(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.see(scaler.get_scale(), bool(torch.isfinite(norm)))
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
def checkpointed_blocks_with_dropout(run: Run) -> None:
    model = Checkpointed().to(run.device)
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(8):
        x, y = labelled(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


@training()
def checkpoint_around_graphed_blocks(run: Run) -> None:
    blocks = nn.Sequential(*[Residual(8) for _ in range(4)]).to(run.device)
    head = nn.Linear(8, 3).to(run.device)
    fast = run.graph(lambda x: checkpoint_sequential(blocks, 2, x, use_reentrant=False))
    optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.05)
    for i in range(8):
        x, y = labelled(run, i)
        optimizer.zero_grad()
        loss = F.cross_entropy(head(fast(x)), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(blocks, head)


@training()
def exponential_moving_average(run: Run) -> None:
    model = mlp(run)
    fast = run.graph(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(8):
        x, y = labelled(run, i)
        optimizer.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            run.see(average(x))
    run.see(average, int(average.n_averaged))


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


@training(recordings=4)
def frozen_then_unfrozen(run: Run) -> None:
    body, head = mlp(run, outputs=8), nn.Linear(8, 3).to(run.device)
    model = nn.Sequential(body, nn.ReLU(), head)
    fast = run.graph(model)
    body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(14):
        if i == 7:
            body.requires_grad_(True)
        x, y = labelled(run, i)
        optimizer.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        optimizer.step()
        run.see([p.grad for p in model.parameters()])
    run.see(model)


@training(recordings=6)
def gradual_unfreezing(run: Run) -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).to(run.device)
    fast = run.graph(model)
    for p in model[:2].parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    for i in range(18):
        if i in (6, 12):
            layer = model[1] if i == 6 else model[0]
            for p in layer.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        x, y = labelled(run, i)
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)


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
