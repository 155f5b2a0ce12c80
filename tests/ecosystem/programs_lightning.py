"""Training with Lightning: automatic and manual optimisation, and Fabric."""

from __future__ import annotations

import logging
from typing import Any

import lightning_fabric
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

import onelaunch as ol

from .harness import Run, inference, training
from .programs_training import labelled, mlp

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(run: Run, batches: int = 6, seed: int = 0) -> DataLoader[Any]:
    data = [labelled(run, seed + i, 1) for i in range(8 * batches)]
    return DataLoader([(x[0].cpu(), y[0].cpu()) for x, y in data], batch_size=8)


class Log(Callback):
    """What a user would follow: losses, the step, learning rates."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        rates = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
        self.run.see(outputs, trainer.global_step, rates)


def trainer(run: Run, *callbacks: Callback, **options: Any) -> pl.Trainer:
    settings = {
        "accelerator": "cpu" if run.device.type == "cpu" else "gpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [Log(run), *callbacks],
    }
    return pl.Trainer(**{**settings, **options})


class Classifier(pl.LightningModule):
    """Automatic optimisation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(-1) == y).float().mean())

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@training()
def lightning_with_the_inner_module_graphed(run: Run) -> None:
    module = Classifier(run.graph(mlp(run)))
    trainer(run).fit(module, loader(run))
    run.see(module)


@training(replays=8, recordings=1)
def lightning_with_the_module_graphed(run: Run) -> None:
    module = Classifier(mlp(run))
    trainer(run).fit(run.graph(module), loader(run))
    run.see(module)


@training(replays=20, recordings=2)
def lightning_validates_in_every_epoch(run: Run) -> None:
    module = Classifier(run.graph(mlp(run)))
    running = trainer(run, max_epochs=3)
    running.fit(module, loader(run), loader(run, 4, 100))
    run.see(module, float(running.callback_metrics["accuracy"]))


@training(replays=8, recordings=1)
def lightning_with_a_graphed_training_step(run: Run) -> None:
    class Stepped(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(run))
            self.training_step = run.graph(self.training_step)

        def training_step(self, batch: Any) -> Tensor:  # an index would be a constant
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    module = Stepped()
    trainer(run).fit(module, loader(run))
    run.see(module)


@training(replays=8, recordings=1)
def lightning_with_a_graphed_loss(run: Run) -> None:
    class Other(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(run))
            self.loss = run.graph(self.loss)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(*batch)

    module = Other()
    trainer(run).fit(module, loader(run))
    run.see(module)


@training()
def lightning_accumulates_and_clips(run: Run) -> None:
    module = Classifier(run.graph(mlp(run)))
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer(run, **options).fit(module, loader(run, 8))
    run.see(module)


@training()
def lightning_in_bfloat16(run: Run) -> None:
    module = Classifier(run.graph(mlp(run)))
    trainer(run, precision="bf16-mixed").fit(module, loader(run))
    run.see(module)


@training(recordings=2)
def lightning_averages_weights(run: Run) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    _averaged(run, net.to(run.device))


@training(refused={"cpu": "OL101", "cuda": "OL101"})
def lightning_refreshes_batch_norm_after_averaging(run: Run) -> None:
    """That sets `momentum=None`, and the host computes one at each call."""
    _averaged(run, mlp(run))


def _averaged(run: Run, net: nn.Module) -> None:
    module = Classifier(run.graph(net))
    averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    trainer(run, averaging, max_epochs=3).fit(module, loader(run))
    run.see(module)


class Manual(Classifier):
    """Manual optimisation, as the documentation writes it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return ol.capturable(torch.optim.Adam(self.parameters(), lr=1e-2))


@training()
def lightning_manual_with_the_inner_module_graphed(run: Run) -> None:
    module = Manual(run.graph(mlp(run)))
    trainer(run).fit(module, loader(run))
    run.see(module)


@training(replays=8, recordings=1)
def lightning_manual_with_the_module_graphed(run: Run) -> None:
    module = Manual(mlp(run))
    trainer(run).fit(run.graph(module), loader(run))
    run.see(module)


@training(replays=8, recordings=1)
def lightning_manual_with_a_graphed_step(run: Run) -> None:
    """Forward, backward and optimizer: Lightning counts the steps of its optimizers inside."""

    class Stepped(Manual):
        def __init__(self) -> None:
            super().__init__(mlp(run))
            self.training_step = run.graph(self.training_step)

        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch, 0)

    module = Stepped()
    running = trainer(run)
    running.fit(module, loader(run))
    run.see(module, running.global_step)


@training(replays=8, recordings=1)
def lightning_manual_with_the_raw_optimizer_graphed(run: Run) -> None:
    """The step of torch's own optimizer, beside Lightning's counts."""

    class Raw(Manual):
        def __init__(self) -> None:
            super().__init__(mlp(run))
            self.step = run.graph(self.step)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.net(x), y)
            self.optimizers(use_pl_optimizer=False).zero_grad()
            loss.backward()
            self.optimizers(use_pl_optimizer=False).step()
            return loss.detach()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.step(*batch)

    module = Raw()
    trainer(run).fit(module, loader(run))
    run.see(module)


@training(recordings=6)
def lightning_manual_with_two_optimizers(run: Run) -> None:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = run.graph(nn.Linear(4, 8))
            self.critic = run.graph(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))

        def training_step(self, batch: Any, index: int) -> Tensor:
            real, of_generator, of_critic = batch[0], *self.optimizers()
            fake = self.generator(torch.randn(len(real), 4, device=real.device))
            loss = F.softplus(self.critic(fake.detach())) + F.softplus(-self.critic(real))
            of_critic.zero_grad()
            self.manual_backward(loss.mean())
            of_critic.step()
            believed = F.softplus(-self.critic(fake)).mean()
            of_generator.zero_grad()
            self.manual_backward(believed)
            of_generator.step()
            return believed.detach()

        def configure_optimizers(self) -> Any:
            parts = (self.generator, self.critic)
            return [torch.optim.Adam(part.parameters(), lr=2e-3) for part in parts], []

    module = Gan()
    trainer(run).fit(module, loader(run))
    run.see(module)


@inference()
def lightning_predicts(run: Run) -> None:
    module = Classifier(run.graph(mlp(run)))
    running = trainer(run)
    run.see(torch.cat(running.predict(module, loader(run, 8))))


@inference()
def a_lightning_module_without_a_trainer(run: Run) -> None:
    module = Classifier(mlp(run)).to(run.device).eval()
    fast = run.graph(module)
    with torch.inference_mode():
        for i in range(8):
            run.see(fast(run.rand(i, 5, 8)))


# Fabric


def fabric(run: Run, **options: Any) -> Any:
    kind = "cpu" if run.device.type == "cpu" else "cuda"
    return lightning_fabric.Fabric(accelerator=kind, devices=1, **options)


def _fabric_fits(run: Run, around: Any, model: Any, optimizer: Any, data: Any) -> None:
    for _ in range(2):
        for i, (x, y) in enumerate(data):
            loss = F.cross_entropy(model(x), y)
            around.backward(loss)
            if i % 2:  # gradients of two batches
                around.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            run.see(loss)


@training()
def fabric_sets_up_a_graphed_model(run: Run) -> None:
    around, net = fabric(run), mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = around.setup(run.graph(net), optimizer)
    _fabric_fits(run, around, model, optimizer, around.setup_dataloaders(loader(run)))
    run.see(net)


@training()
def fabric_in_bfloat16(run: Run) -> None:
    around, net = fabric(run, precision="bf16-mixed"), mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = around.setup(run.graph(net), optimizer)
    _fabric_fits(run, around, model, optimizer, around.setup_dataloaders(loader(run)))
    run.see(net)


@training(refused={"cpu": "OL112", "cuda": "OL112"})
def a_graph_of_what_fabric_set_up_is_refused(run: Run) -> None:
    """Fabric hooks each result, to see that its own `backward` is called."""
    around, net = fabric(run), mlp(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = around.setup(net, optimizer)
    _fabric_fits(run, around, run.graph(model), optimizer, around.setup_dataloaders(loader(run)))


@training(replays=8, recordings=1)
def fabric_with_a_graphed_step(run: Run) -> None:
    around, net = fabric(run), mlp(run)
    optimizer = ol.capturable(torch.optim.AdamW(net.parameters(), lr=1e-2))
    model, optimizer = around.setup(net, optimizer)

    @run.graph
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        around.backward(loss)
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        for x, y in around.setup_dataloaders(loader(run)):
            run.see(step(x, y))
    run.see(net)
