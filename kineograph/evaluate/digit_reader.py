"""The reader: a small network that says which digits a clip or picture shows, in which colour, and where they go or stand.

Each of the ten digits has a map of where it is seen, frame by frame. How strongly it is seen anywhere says whether it is
there; features gathered under its map give the colour; the way the map's centre goes gives direction and place. So every
attribute belongs to its digit, and one or two digits need no matching. Two equal digits on one canvas are beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kineograph.core.errors import InputError
from kineograph.data.digit_captions import COLOURS, DIRECTIONS, PLACES, Facts, Figure

SIDE = 32  # every frame is brought to SIDE × SIDE
FRAMES = 4  # of a clip, evenly spaced, the first and the last among them
COLOUR_NAMES = (*COLOURS, None)  # None: white
DIRECTION_NAMES = (*DIRECTIONS, None)  # None: stands still
MOST_FIGURES = 2
SURE = 0.5  # a second digit counts when it is more likely there than not

WEIGHTS = Path(__file__).with_name("reader.safetensors")


@dataclass
class Reading:
    """Logits for each of the ten digits."""

    presence: Tensor  # B 10
    colour: Tensor  # B 10 7
    direction: Tensor | None  # B 10 9; None for pictures
    place: Tensor  # B 10 9


class ReaderNet(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            _conv(3, 32, 4, 2),  # 16 × 16
            _conv(32, 64, 3, 1),
            _conv(64, width, 3, 2),  # 8 × 8
            _conv(width, width, 3, 1),
            _conv(width, width, 3, 1),
        )
        self.seen = nn.Conv2d(width, 10, 1)
        nn.init.constant_(self.seen.bias, -6.0)  # type: ignore[arg-type]  # at first no digit is seen anywhere: log 64 − 6 < 0
        self.colour = _mlp(width, len(COLOUR_NAMES))
        self.direction = _mlp(width + 2 * FRAMES, len(DIRECTION_NAMES))
        self.place = _mlp(width + 2, len(PLACES))

    def forward(self, frames: Tensor) -> Reading:
        """B T 3 SIDE SIDE, in [0, 1], T = FRAMES or 1."""
        return self.heads(
            rearrange(
                self.trunk(rearrange(frames, "b t c h w -> (b t) c h w")), "(b t) c h w -> b t c h w", t=frames.shape[1]
            )
        )

    def heads(self, features: Tensor) -> Reading:
        """B T D h w → the reading."""
        frames, side = features.shape[1], features.shape[-1]
        logits = rearrange(
            self.seen(rearrange(features, "b t d h w -> (b t) d h w")), "(b t) n h w -> b t n (h w)", t=frames
        )
        presence = logits.logsumexp(-1).mean(1)  # B 10
        maps = logits.softmax(-1)  # B T 10 (h w)
        gathered = torch.einsum("btnp,btdp->bnd", maps, rearrange(features, "b t d h w -> b t d (h w)")) / frames
        line = torch.linspace(-1, 1, side, device=features.device, dtype=features.dtype)
        grid = torch.stack([line.repeat_interleave(side), line.repeat(side)], -1)  # (h w) 2
        centres = torch.einsum("btnp,pc->bntc", maps, grid)  # B 10 T 2
        middle = centres.mean(2)
        way = rearrange(centres - middle[:, :, None], "b n t c -> b n (t c)")
        return Reading(
            presence,
            self.colour(gathered),
            self.direction(torch.cat([gathered, 4 * way], -1)) if frames > 1 else None,
            self.place(torch.cat([gathered, 4 * middle], -1)),
        )


def _conv(inner: int, outer: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, size, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
    )


def _mlp(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, 64), nn.ReLU(inplace=True), nn.Linear(64, outer))


def prepare(pixels: Tensor) -> Tensor:
    """B T C H W float in [0, 1], any size → B t 3 SIDE SIDE, t = FRAMES or 1."""
    count, channels = pixels.shape[1], pixels.shape[2]
    if count > 1:
        moments = torch.linspace(0, count - 1, FRAMES).round().long()
        pixels = pixels[:, moments.to(pixels.device)]
    pixels = pixels[:, :, :3] if channels >= 3 else pixels[:, :, :1].expand(-1, -1, 3, -1, -1)
    frames = rearrange(pixels, "b t c h w -> (b t) c h w").float()
    if frames.shape[-2:] != (SIDE, SIDE):
        frames = F.interpolate(frames, (SIDE, SIDE), mode="bilinear", antialias=True)
    return rearrange(frames, "(b t) c h w -> b t c h w", b=pixels.shape[0])


class Reader:
    """The trained network in use."""

    def __init__(self, net: ReaderNet, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.net = net.float().eval().requires_grad_(False).to(self.device)

    @staticmethod
    def load(path: Path | str = WEIGHTS, device: torch.device | str = "cpu") -> Reader:
        """The shipped weights, or those of a file that train_reader wrote."""
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path} is not a readable safetensors file ({error}): python -m kineograph.evaluate.train_reader writes one"
            ) from None
        net = ReaderNet()
        try:
            net.load_state_dict(tensors)
        except RuntimeError as error:
            raise InputError(f"{path} does not hold this reader's weights: {error}") from None
        return Reader(net, device)

    @torch.no_grad()
    def read(self, pixels: Tensor, chunk: int = 256) -> list[Facts]:
        """B T C H W, float in [0, 1] → what each clip (T > 1: digit, colour, direction) or picture (digit, colour, place) shows."""
        facts: list[Facts] = []
        for part in pixels.split(chunk):
            facts += _facts(self.net(prepare(part.to(self.device))))
        return facts


def _facts(reading: Reading) -> list[Facts]:
    """The likeliest digit, and a second one where it is likely too."""
    found = reading.presence.sigmoid().topk(MOST_FIGURES, dim=-1)
    colours = reading.colour.argmax(-1).tolist()
    directions = reading.direction.argmax(-1).tolist() if reading.direction is not None else None
    places = reading.place.argmax(-1).tolist()
    result = []
    for row, (chances, digits) in enumerate(zip(found.values.tolist(), found.indices.tolist(), strict=True)):
        result.append(
            tuple(
                Figure(
                    digit,
                    COLOUR_NAMES[colours[row][digit]],
                    direction=DIRECTION_NAMES[directions[row][digit]] if directions else None,
                    place=None if directions else PLACES[places[row][digit]],
                )
                for rank, (chance, digit) in enumerate(zip(chances, digits, strict=True))
                if rank == 0 or chance > SURE
            )
        )
    return result


def reading_loss(reading: Reading, targets: Tensor) -> dict[str, Tensor]:
    """Mean cross-entropies. `targets` B figures 4: digit, colour, direction, place as indices; −1: no such figure or attribute."""
    digit = targets[..., 0]
    there = digit >= 0
    present = F.one_hot(digit.clamp(min=0), 10) * there[..., None]  # B figures 10
    wanted = reduce(present, "b f n -> b n", "max").to(reading.presence.dtype)
    losses = {"digit": 4 * F.binary_cross_entropy_with_logits(reading.presence, wanted)}
    for position, (name, logits) in enumerate(
        (("colour", reading.colour), ("direction", reading.direction), ("place", reading.place)), 1
    ):
        if logits is not None:
            own = torch.einsum("bfn,bnk->bfk", present.to(logits.dtype), logits)
            label = torch.where(there, targets[..., position], -1)
            total = F.cross_entropy(
                rearrange(own, "b f k -> (b f) k"), rearrange(label, "b f -> (b f)"), ignore_index=-1, reduction="sum"
            )
            losses[name] = total / (label >= 0).sum().clamp(min=1)
    return losses
