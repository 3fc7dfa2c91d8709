"""The contrastive loss of CLIP: each picture picks its caption among a batch's captions, each caption its picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kineograph.core import distributed


@dataclass
class Contrast:
    """Sums over the rows of this process."""

    loss: Tensor
    picked_text: Tensor  # pictures whose best caption is theirs
    picked_image: Tensor  # captions whose best picture is theirs
    rows: int
    scale: Tensor  # 1/temperature


def contrast(images: Tensor, texts: Tensor, keys: Tensor, scale: Tensor, over_ranks: bool) -> Contrast:
    """Symmetric InfoNCE of unit vectors, images B D and texts B D; `keys` (B, int64) are equal where captions are.

        loss = ½ Σᵢ [ −log e^{s·xᵢyᵢ} / Σ_{j ∈ N(i)} e^{s·xᵢyⱼ}  −log e^{s·xᵢyᵢ} / Σ_{j ∈ N(i)} e^{s·xⱼyᵢ} ]

    N(i) is i and all j with another caption. A second picture of the same caption is as right an answer as the first: counted as a wrong
    one it would push pictures away from their own caption, the more so the fewer captions there are, and no weights could bring the loss
    to 0. So equal captions neither reward nor punish one another. With `over_ranks` the batch is that of all processes, whose rows are
    equally many; each process takes the loss of its own rows.
    """
    with torch.autocast(images.device.type, enabled=False):  # a logit of 100 has steps of 0.5 in bf16
        images, texts = images.float(), texts.float()
        everyone = distributed.all_gather_with_grad if over_ranks else lambda value: value
        all_images, all_texts, all_keys = everyone(images), everyone(texts), everyone(keys)
        rows, first = len(keys), len(keys) * distributed.data_rank() if over_ranks else 0
        own = torch.arange(first, first + rows, device=keys.device)
        same = keys[:, None] == all_keys[None]  # B N
        alike = same & (own[:, None] != torch.arange(len(all_keys), device=keys.device))
        to_texts, to_images = scale * images @ all_texts.T, scale * texts @ all_images.T  # B N
        loss = sum(
            F.cross_entropy(logits.masked_fill(alike, -torch.inf), own, reduction="sum")
            for logits in (to_texts, to_images)
        )
        text, image = (same.gather(1, logits.argmax(1, keepdim=True)).sum() for logits in (to_texts, to_images))
    assert isinstance(loss, Tensor)
    return Contrast(loss / 2, text, image, rows, scale)
