"""Trains the digit reader on moving digits of all settings, sizes and lengths, with augmentation.

The command of the shipped weights is in their metadata (this file was kineograph.evaluate.train_reader then);
`--show` prints it, with the accuracy on held-out items.

    python tools/train_digit_reader.py --device cuda --steps 12000 --batch 512 --workers 14
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kineograph.core.noise import Noise, numpy_rng
from kineograph.data.digit_captions import PLACES, Facts
from kineograph.data.moving_digits import MovingDigits, MovingDigitsConfig
from kineograph.evaluate.digit_reader import (
    COLOUR_NAMES,
    DIRECTION_NAMES,
    MOST_FIGURES,
    WEIGHTS,
    Reader,
    ReaderNet,
    Reading,
    preprocess,
)
from kineograph.evaluate.metric.caption_accuracy import Tally, parse_prompt

STILL = DIRECTION_NAMES.index(None)
GROUP = 16  # items with the same config; a batch has many groups


# Data ------------------------------------------------------------------------------------------------------------


def random_config(rng: np.random.Generator, moving: bool) -> MovingDigitsConfig:
    """Any setting of the dataset; canvases with an aspect ratio of up to 2."""
    shorter = int(rng.choice([32, 32, 40, 48, 64, 64]))
    longer = shorter if rng.random() < 0.7 else int(shorter * rng.uniform(1, 2))
    size = (shorter, longer) if rng.random() < 0.5 else (longer, shorter)
    frames = int(rng.choice([2, 4, 8, 8, 8, 16, 17])) if moving else 1
    digits = int(rng.choice([1, 2]))
    default = MovingDigitsConfig(size=size, frames=frames, digits=digits)
    speed = None
    if moving and rng.random() < 0.7:
        slowest = shorter / 8 / (frames - 1)
        speed = rng.uniform(
            slowest, min(1.6 * default.canvas.speed, (shorter - default.canvas.side) / 0.7 / (frames - 1))
        )
        speed = max(speed, slowest)
    return MovingDigitsConfig(
        size=size,
        frames=frames,
        digits=digits,
        speed=speed,
        coloured=bool(rng.random() < 0.75),
        kept_out=0,  # a reader must not prefer the combinations that models are trained on
    )


def encode_targets(facts: Facts) -> np.ndarray:
    """Figures × (digit, colour, direction, place), −1: none."""
    rows = np.full((MOST_FIGURES, 4), -1)
    for row, figure in zip(rows, facts, strict=False):
        row[:2] = figure.digit, COLOUR_NAMES.index(figure.colour)
        if figure.direction:
            row[2] = DIRECTION_NAMES.index(figure.direction)
        if figure.place:
            row[3] = PLACES.index(figure.place)
    return rows


class Batches(Dataset):
    """Step → clips and images, half of the items each: frames uint8 n t 3 SIDE SIDE, targets n figures 4."""

    def __init__(self, seed: int, steps: int, batch: int) -> None:
        self.seed, self.steps, self.groups = seed, steps, max(1, batch // (2 * GROUP))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[tuple[Tensor, Tensor]]:
        batches = []
        for moving in (True, False):
            rngs = (numpy_rng("reader", self.seed, step, number, moving) for number in range(self.groups))
            frames, targets = zip(*(self._read_group(rng, moving) for rng in rngs), strict=True)
            batches.append((torch.cat(frames), torch.cat(targets)))
        return batches

    def _read_group(self, rng: np.random.Generator, moving: bool) -> tuple[Tensor, Tensor]:
        source = MovingDigits(random_config(rng, moving), "train")
        items = [source.item(index) for index in rng.integers(0, 2**40, GROUP).tolist()]
        pixels = torch.from_numpy(np.stack([source.paint(item) for item in items]))
        frames = (preprocess(pixels.float() / 255) * 255).round().to(torch.uint8)  # small to send
        return frames, torch.from_numpy(np.stack([encode_targets(item.facts) for item in items]))


def augment(frames: Tensor, targets: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Imitate the errors of codecs and generators: warp, shift, blur, fade, tint, noise, and clips without motion."""
    count, times = frames.shape[:2]
    device = frames.device

    def uniform(name: str, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * noise.uniform(name, *shape)

    if times > 1:
        still = noise.bernoulli("still", 0.06)
        frames = torch.where(still[:, None, None, None, None], frames[:, :1], frames)
        direction = torch.where((targets[..., 2] >= 0) & still[:, None], STILL, targets[..., 2])
        targets = torch.cat([targets[..., :2], direction[..., None], targets[..., 3:]], -1)

    # x ↦ A x + b: rotate, stretch and shear a little (less for images, whose places lie close), shift by less than a pixel
    limit = 0.12 if times > 1 else 0.06
    bend = uniform("bend", -limit, limit, 2, 2) + torch.eye(2, device=device)
    shift = uniform("shift", -0.03, 0.03, 2, 1)
    grid = F.affine_grid(torch.cat([bend, shift], -1), [count, 1, *frames.shape[-2:]], align_corners=False)
    bent = F.grid_sample(rearrange(frames, "b t c h w -> b (t c) h w"), grid, align_corners=False)

    sigma = uniform("blur", 0.05, 1.0)
    taps = torch.exp(-0.5 * (torch.arange(-2, 3, device=device) / sigma[:, None]) ** 2)
    taps = taps / taps.sum(-1, keepdim=True)
    planes = bent.shape[1]
    for axis in (2, 3):
        kernel = taps.repeat_interleave(planes, 0).view(-1, 1, *([5, 1] if axis == 2 else [1, 5]))
        padding = (2, 0) if axis == 2 else (0, 2)
        bent = F.conv2d(rearrange(bent, "b p h w -> 1 (b p) h w"), kernel, padding=padding, groups=count * planes)
        bent = rearrange(bent, "1 (b p) h w -> b p h w", b=count)
    frames = rearrange(bent, "b (t c) h w -> b t c h w", t=times)

    frames = frames * uniform("fade", 0.65, 1.1, 1, 1, 1, 1) * uniform("tint", 0.88, 1.05, 1, 3, 1, 1) + uniform(
        "lift", 0, 0.06, 1, 1, 1, 1
    )
    speckle = uniform("speckle", 0, 0.08, 1, 1, 1, 1) * noise.normal("speckles", *frames.shape[1:])
    return (frames + speckle).clamp(0, 1), targets


# Training --------------------------------------------------------------------------------------------------------


def train(steps: int, batch: int, lr: float, seed: int, device: torch.device, workers: int) -> ReaderNet:
    torch.manual_seed(seed)
    net = ReaderNet().to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    matrices = [weight for weight in net.parameters() if weight.ndim > 1]
    vectors = [weight for weight in net.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}], lr=lr
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    loader = DataLoader(
        Batches(seed, steps, batch), batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    began = time.monotonic()
    for step, kinds in enumerate(loader):
        losses = training_losses(net, kinds, seed, step, device)
        total = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 40) == 0 or step == steps - 1:
            parts = " ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
            print(f"step {step:6d}  {time.monotonic() - began:6.1f} s  {parts}", flush=True)
    return net


def reading_loss(reading: Reading, targets: Tensor) -> dict[str, Tensor]:
    """Cross-entropies by attribute. `targets` B figures 4: indices of digit, colour, direction, place; −1: none."""
    digit = targets[..., 0]
    exists = digit >= 0
    present = F.one_hot(digit.clamp(min=0), 10) * exists[..., None]  # B figures 10
    target = reduce(present, "b f n -> b n", "max").to(reading.presence.dtype)
    losses = {"digit": 4 * F.binary_cross_entropy_with_logits(reading.presence, target)}
    for position, (name, logits) in enumerate(
        (("colour", reading.colour), ("direction", reading.direction), ("place", reading.place)), 1
    ):
        if logits is not None:
            own = torch.einsum("bfn,bnk->bfk", present.to(logits.dtype), logits)
            label = torch.where(exists, targets[..., position], -1)
            total = F.cross_entropy(
                rearrange(own, "b f k -> (b f) k"), rearrange(label, "b f -> (b f)"), ignore_index=-1, reduction="sum"
            )
            losses[name] = total / (label >= 0).sum().clamp(min=1)
    return losses


def training_losses(
    net: ReaderNet, kinds: list[tuple[Tensor, Tensor]], seed: int, step: int, device: torch.device
) -> dict[str, Tensor]:
    """Losses of clips and images. Both go through the trunk together, so that batch norm sees the whole mix."""
    ready = []
    for number, (frames, targets) in enumerate(kinds):
        noise = Noise.for_rows(seed, 2 * step + number, len(frames), device)
        ready.append(augment(frames.to(device).float() / 255, targets.to(device), noise))
    flat = torch.cat([rearrange(frames, "b t c h w -> (b t) c h w") for frames, _ in ready])
    features = net.trunk(flat.contiguous(memory_format=torch.channels_last))
    sizes = [frames.shape[0] * frames.shape[1] for frames, _ in ready]
    losses: dict[str, Tensor] = {}
    for part, (frames, targets) in zip(features.split(sizes), ready, strict=True):
        reading = net.heads(rearrange(part, "(b t) d h w -> b t d h w", t=frames.shape[1]))
        for name, value in reading_loss(reading, targets).items():
            losses[name] = losses[name] + value if name in losses else value
    return losses


def format_command(arguments: argparse.Namespace) -> str:
    """The command that trains the same weights again."""
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("steps", "batch", "lr", "seed", "device"))
    return f"python tools/train_digit_reader.py {options}"


def save(net: ReaderNet, path: Path, command: str) -> None:
    tensors = {}
    for name, value in net.state_dict().items():
        tensors[name] = (value.half() if value.is_floating_point() else value).contiguous().cpu()
    save_file(tensors, str(path), metadata={"command": command})


def measure_ceiling(source: MovingDigits, reader: Reader, count: int, chunk: int = 256) -> Tally:
    """The reader's accuracy on the first `count` real items of a source: a perfect generator's score."""
    tally = Tally()
    for first in range(0, count, chunk):
        samples = [source.read(index) for index in range(first, min(first + chunk, count))]
        pixels = torch.stack([sample.pixels for sample in samples]).float() / 255  # type: ignore[misc]
        tally.add([parse_prompt(sample.caption or "") for sample in samples], reader.read(pixels, chunk))
    return tally


def report(reader: Reader, count: int) -> None:
    """Print the accuracy on real held-out items."""
    for frames, digits, coloured, size in (
        (1, 1, True, 32),
        (8, 1, True, 32),
        (8, 1, False, 32),
        (16, 1, True, 64),
        (1, 2, True, 64),
        (8, 2, True, 64),
        (17, 2, True, 64),
        (8, 2, False, 32),
    ):
        config = MovingDigitsConfig(frames=frames, digits=digits, coloured=coloured, size=(size, size))
        score = measure_ceiling(MovingDigits.open(config, "validation"), reader, count)
        rates = " ".join(f"{name} {rate:.4f}" for name, rate in score.rates.items())
        setting = (
            f"{digits} digit{'s' * (digits > 1)}, {frames:2d} frames, {size} px, {'coloured' if coloured else 'white'}"
        )
        print(f"{setting}: all {score.accuracy:.4f}  {rates}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tools/train_digit_reader.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--batch", type=int, default=512, help=f"items a step, a multiple of {2 * GROUP}")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument(
        "--show", action="store_true", help="do not train: print the command and accuracy of the weights"
    )
    parser.add_argument("--count", type=int, default=2000, help="held-out items to measure on")
    arguments = parser.parse_args()
    if not arguments.show:
        net = train(
            arguments.steps,
            arguments.batch,
            arguments.lr,
            arguments.seed,
            torch.device(arguments.device),
            arguments.workers,
        )
        save(net, arguments.out, format_command(arguments))
    with safe_open(str(arguments.out), framework="pt") as file:
        print((file.metadata() or {}).get("command"))
    report(Reader.load(arguments.out, arguments.device), arguments.count)


if __name__ == "__main__":
    main()
