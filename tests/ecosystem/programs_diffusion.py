"""Diffusion with diffusers: its pipelines, loops over its schedulers, and training."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from .harness import Run, inference, training

SIZES: dict[str, Any] = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
PLAIN = {
    **SIZES,
    "in_channels": 1,
    "out_channels": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}
GUIDED = {
    **SIZES,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
}


def unet(run: Run, kind: str, **config: Any) -> Any:
    """A small network of random weights."""
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**config).to(run.device)


def _pictures(run: Run, kind: str) -> None:
    """Two batches of a pipeline whose network is graphed, after it was made."""
    model = unet(run, "UNet2DModel", **PLAIN).eval()
    scheduler = getattr(diffusers, f"{kind}Scheduler")(num_train_timesteps=50)
    pipeline = getattr(diffusers, f"{kind}Pipeline")(unet=model, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet = run.graph(pipeline.unet)
    for i in range(2):
        drawn = torch.Generator().manual_seed(i)
        options = {"num_inference_steps": 8, "output_type": "np"}
        run.see(torch.from_numpy(pipeline(batch_size=2, generator=drawn, **options).images))


@inference(replays=10, recordings=1)
def pictures_by_a_ddpm_pipeline(run: Run) -> None:
    _pictures(run, "DDPM")


@inference(replays=10, recordings=1)
def pictures_by_a_ddim_pipeline(run: Run) -> None:
    _pictures(run, "DDIM")


def _denoised(run: Run, kind: str) -> None:
    """A loop of one's own, guided by a text: two halves of a batch, with it and without."""
    model = run.graph(unet(run, "UNet2DConditionModel", **GUIDED).eval())
    scheduler = getattr(diffusers, kind)(num_train_timesteps=50)
    with torch.no_grad():
        for i in range(2):
            scheduler.set_timesteps(8, device=run.device)
            text = run.rand(i, 2, 5, 16)
            x = run.rand(20 + i, 1, 4, 8, 8) * scheduler.init_noise_sigma
            for t in scheduler.timesteps:
                both = scheduler.scale_model_input(torch.cat([x, x]), t)
                without, with_text = model(both, t, encoder_hidden_states=text).sample.chunk(2)
                guided = without + 5 * (with_text - without)
                x = scheduler.step(guided, t, x).prev_sample
            run.see(x)


@inference(replays=10, recordings=1)
def guided_by_a_text_with_euler(run: Run) -> None:
    _denoised(run, "EulerDiscreteScheduler")


@inference(replays=10, recordings=1)
def guided_by_a_text_with_dpm_solver(run: Run) -> None:
    _denoised(run, "DPMSolverMultistepScheduler")


@training(recordings=1)
def a_network_that_tells_the_noise(run: Run) -> None:
    model = unet(run, "UNet2DModel", **PLAIN)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    fast = run.graph(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(7):
        clean, noise, t = run.rand(i, 4, 1, 8, 8), run.rand(50 + i, 4, 1, 8, 8), run.ints(i, 50, 4)
        optimizer.zero_grad()
        loss = (fast(scheduler.add_noise(clean, noise, t), t).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        run.see(loss)
    run.see(model)
