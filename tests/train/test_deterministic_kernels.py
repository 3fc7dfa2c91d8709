"""Kernels whose gradients add up in any order: under train.deterministic they give the same bits each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kineograph.codec.perceptual import Lpips
from kineograph.core.kernels import enable_flash_attention_3
from kineograph.nn.attention import attend
from kineograph.nn.nearby import nearby_attend
from kineograph.nn.quantizers import VQ, VQConfig
from kineograph.nn.window import Window
from kineograph.process.autoregression import draw_top_p
from kineograph.process.token_sampling import cumulative_sum, draw_tokens
from kineograph.train.determinism import deterministic_algorithms

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
REPEATS = 8


def check_gradients(call: Callable[..., Tensor], *shape: int) -> None:
    """Forward and backward of q, k, v, several times."""
    torch.manual_seed(0)
    with deterministic_algorithms(CUDA):
        inputs = [torch.randn(*shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        weights = torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)
        first: list[Tensor] = []
        for _ in range(REPEATS):
            output = call(*inputs)
            found = [output, *torch.autograd.grad((output * weights).sum(), inputs)]
            first = first or found
            for one, other in zip(first, found, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "dropout"])
@pytest.mark.parametrize("tokens", [320, 2048])
def test_attention(tokens: int, kind: str, compiled: bool) -> None:
    enable_flash_attention_3(CUDA)  # where it is installed
    mask = torch.rand(4, 1, 1, tokens, device=CUDA) < 0.9 if kind == "masked" else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, dropout=0.1 if kind == "dropout" else 0.0, causal=kind == "causal")

    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return step(q, k, v)

    step = torch.compile(call, dynamic=False) if compiled else call
    check_gradients(seeded, 4, 8, tokens, 64)


@pytest.mark.parametrize("backend", ["flex", "dense"])
def test_nearby_attention(backend: str) -> None:
    grid, window = (10, 16, 16), Window((3, 3, 3))
    step = torch.compile(nearby_attend, dynamic=False)
    check_gradients(lambda q, k, v: step(q, k, v, grid, window, backend=backend), 2, 4, 2560, 64)


@pytest.mark.parametrize("compiled", [False, True])
def test_codebooks(compiled: bool) -> None:
    """Thousands of tokens are added to each of a few codes."""
    found = []
    for _ in range(REPEATS):
        torch.manual_seed(0)
        quantizer = VQ(32, VQConfig(codes=16, dim=8)).to(CUDA)
        features = torch.randn(16, 32, 64, 64, device=CUDA, requires_grad=True)
        step = torch.compile(quantizer) if compiled else quantizer
        with deterministic_algorithms(CUDA):
            for _ in range(3):
                result = step(features)
            gradient = torch.autograd.grad(result.z.square().sum() + result.loss, features)[0]
        found.append([quantizer.codebook.clone(), quantizer.mass.clone(), gradient])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_embeddings(compiled: bool) -> None:
    table = torch.randn(64, 128, device=CUDA, requires_grad=True)
    ids = torch.randint(0, 64, (64, 1024), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    weights = torch.randn(64, 1024, 128, device=CUDA)

    def call(table: Tensor) -> Tensor:
        return (torch.nn.functional.embedding(ids, table) * weights).sum() + (table[ids[:, :8]] * weights[:, :8]).sum()

    step = torch.compile(call) if compiled else call
    with deterministic_algorithms(CUDA):
        found = [torch.autograd.grad(step(table), table)[0] for _ in range(REPEATS)]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_perceptual_loss(compiled: bool) -> None:
    """Max-pools and convolutions of channels-last pictures."""
    torch.manual_seed(0)
    network = Lpips().requires_grad_(False).to(CUDA)
    pictures = torch.rand(8, 3, 128, 128, device=CUDA, requires_grad=True)
    others = torch.rand(8, 3, 128, 128, device=CUDA)
    step = torch.compile(network) if compiled else network
    found = []
    with deterministic_algorithms(CUDA):
        for _ in range(REPEATS):
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(pictures, others).sum()
            found.append(torch.autograd.grad(loss, pictures)[0])
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("rows", [1, 64])
def test_drawing_tokens(rows: int) -> None:
    """A critic draws in every training step; a single row is the case for which torch refuses cumsum."""
    generator = torch.Generator(CUDA).manual_seed(0)
    logits = torch.randn(rows, 65_536, device=CUDA, generator=generator)
    uniforms = torch.rand(rows, device=CUDA, generator=generator)
    with deterministic_algorithms(CUDA):
        found = [
            torch.cat(
                [
                    cumulative_sum(logits.exp())[:, -1],
                    draw_tokens(logits, uniforms)[1],
                    draw_top_p(logits, uniforms, top_p=0.9),
                ]
            )
            for _ in range(REPEATS)
        ]
    assert all(torch.equal(found[0], other) for other in found)
