from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import vector_quantize_pytorch
from safetensors.torch import load_file, save_file
from torch import nn

from kineograph.core.config import Config, parse
from kineograph.core.errors import ConfigError
from kineograph.nn.codebook_use import codebook_histogram, codebook_usage
from kineograph.nn.quantizers import (
    LFQ,
    VQ,
    FSQConfig,
    LFQConfig,
    QuantizerConfig,
    VQConfig,
    build_quantizer,
    straight_through,
)

CONFIGS = [VQConfig(codes=32, dim=4), LFQConfig(codes=64), FSQConfig(levels=(5, 4, 3))]
each_kind = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def no_projection(quantizer: nn.Module) -> nn.Module:
    """Features are the code space itself."""
    quantizer.project_in = quantizer.project_out = nn.Identity()
    return quantizer


# What all three promise --------------------------------------------------------------------------------------------


@each_kind
def test_lookup_of_ids_is_exactly_what_forward_gave(config):
    quantizer = build_quantizer(12, config)
    z = torch.randn(3, 12, 4, 6)
    quantizer(z)  # a training step moves VQ's codebook
    quantizer.eval()
    out = quantizer(z)
    assert out.ids.shape == (3, 4, 6)
    assert out.ids.dtype == torch.int64
    assert 0 <= out.ids.min() <= out.ids.max() < quantizer.codes
    assert out.z.shape == z.shape
    assert torch.equal(quantizer.lookup(out.ids), out.z)


@each_kind
def test_ids_alone_are_those_of_forward_and_ask_for_nothing_else(config, monkeypatch):
    quantizer, z = build_quantizer(12, config), torch.randn(3, 12, 4, 5)
    quantizer(z)  # a training step moves VQ's codebook
    wanted = quantizer.eval()(z).ids
    monkeypatch.setattr("kineograph.core.distributed.all_reduce_", lambda *_: pytest.fail("waits for the other ranks"))
    monkeypatch.setattr(LFQ, "entropies", lambda *_: pytest.fail("computes entropies that nobody reads"))
    assert torch.equal(quantizer.train().ids(z), wanted)
    assert torch.equal(quantizer.ids(z), wanted)  # and nothing has moved


@each_kind
def test_every_id_survives_lookup_and_quantization(config):
    quantizer = no_projection(build_quantizer(8, config)).eval()
    ids = torch.arange(quantizer.codes).view(1, 1, -1)
    codes = quantizer.lookup(ids)
    if config.kind == "fsq":  # undo the squashing, so that codes come out where they were
        half = (quantizer.levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(quantizer.levels % 2 == 0, 0.5, 0.0)
        codes = torch.atanh((codes * (quantizer.levels // 2) + offset) / half) - torch.atanh(offset / half)
    assert torch.equal(quantizer(codes).ids, ids)


@each_kind
def test_gradient_passes_straight_through(config):
    quantizer = build_quantizer(12, config).eval()
    z = torch.randn(2, 12, 3, 3, requires_grad=True)
    quantizer(z).z.square().sum().backward()
    assert torch.isfinite(z.grad).all()
    assert z.grad.abs().sum() > 0
    assert quantizer.project_in.weight.grad.abs().sum() > 0


@each_kind
def test_autocast_changes_no_id(config):
    quantizer = build_quantizer(12, config).eval()
    z = torch.randn(4, 12, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantizer(z)
        looked_up = quantizer.lookup(inside.ids)
    assert inside.z.dtype == torch.float32
    assert torch.equal(inside.ids, quantizer(z).ids)
    assert torch.equal(looked_up, inside.z)


@each_kind
def test_state_dict_carries_everything(config):
    torch.manual_seed(0)
    first, second = build_quantizer(12, config), build_quantizer(12, config)
    z = torch.randn(2, 12, 4, 4)
    for _ in range(3):
        first(z)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        torch.manual_seed(7)
        a = first(z)
        torch.manual_seed(7)
        b = second(z)
        assert torch.equal(a.z, b.z)
        assert torch.equal(a.loss, b.loss)
    assert all(torch.equal(x, y) for x, y in zip(first.state_dict().values(), second.state_dict().values()))


@each_kind
def test_builds_on_the_meta_device(config):
    with torch.device("meta"):
        quantizer = build_quantizer(12, config)
    there, here = quantizer.state_dict(), build_quantizer(12, config).state_dict()
    assert {name: value.shape for name, value in there.items()} == {name: value.shape for name, value in here.items()}
    assert all(value.is_meta for value in there.values())


@each_kind
def test_padding_does_not_count(config):
    torch.manual_seed(0)
    first, second = build_quantizer(12, config), build_quantizer(12, config)
    second.load_state_dict(first.state_dict())
    z = torch.randn(4, 12, 3, 3)
    other = z.clone()
    other[2:] = torch.randn(2, 12, 3, 3) * 5
    keep = torch.tensor([True, True, False, False])
    for quantizer in (first, second):
        if config.kind == "vq":
            quantizer.started.fill_(True)
            quantizer.config = config.model_copy(update={"revive": 0.0})
    a, b = first(z, keep), second(other, keep)
    assert torch.allclose(a.loss, b.loss, atol=1e-6)
    for x, y in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.allclose(x, y, atol=1e-6)


def test_straight_through_has_the_hard_value_and_the_soft_gradient():
    soft = torch.randn(100, requires_grad=True)
    hard = torch.randn(100)
    out = straight_through(hard, soft * 3)
    assert torch.equal(out, hard)
    out.sum().backward()
    assert torch.equal(soft.grad, torch.full((100,), 3.0))


# VQ ----------------------------------------------------------------------------------------------------------------


def test_vq_chooses_as_the_library_does():
    library = vector_quantize_pytorch.VectorQuantize(
        dim=6, codebook_size=40, use_cosine_sim=True, kmeans_init=False, accept_image_fmap=True
    )
    quantizer = no_projection(VQ(6, VQConfig(codes=40, dim=6)))
    quantizer.codebook.copy_(F.normalize(library.codebook, dim=-1))
    z = torch.randn(2, 6, 5, 5)
    assert torch.equal(library.eval()(z)[1], quantizer.eval()(z).ids)


def test_vq_kmeans_finds_clusters():
    torch.manual_seed(0)
    centres = F.normalize(torch.randn(6, 8), dim=-1)
    tokens = centres.repeat_interleave(50, 0) + 0.01 * torch.randn(300, 8)
    quantizer = no_projection(VQ(8, VQConfig(codes=24, dim=8)))
    z = tokens.view(1, 15, 20, 8).permute(0, 3, 1, 2)
    assert quantizer(z).metrics["commitment"] < 1e-3
    unstarted = no_projection(VQ(8, VQConfig(codes=24, dim=8, kmeans=0)))
    assert unstarted(z).metrics["commitment"] > 0.1


def test_vq_codebook_follows_its_tokens_at_the_decay():
    quantizer = no_projection(VQ(2, VQConfig(codes=2, dim=2, decay=0.75, kmeans=0, revive=0.0)))
    quantizer.codebook.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    quantizer.mass.copy_(torch.tensor([4.0, 4.0]))
    token = torch.tensor([0.6, 0.8])
    quantizer(token.view(1, 2, 1, 1).expand(2, 2, 1, 2))  # four times
    expected = 0.75 * 4 * torch.tensor([1.0, 0.0]) + 0.25 * 4 * token
    assert torch.allclose(quantizer.codebook[0], F.normalize(expected, dim=0))
    assert torch.allclose(quantizer.mass, torch.tensor([4.0, 3.0]))
    assert torch.equal(quantizer.codebook[1], torch.tensor([-1.0, 0.0]))


def test_vq_revives_dead_codes_and_only_when_asked():
    def dead_after(revive: float) -> int:
        torch.manual_seed(1)
        quantizer = no_projection(VQ(4, VQConfig(codes=64, dim=4, decay=0.5, kmeans=0, revive=revive)))
        quantizer.codebook[32:] = F.normalize(torch.tensor([1.0, 0, 0, 0]) + 1e-4 * torch.randn(32, 4), dim=-1)
        for _ in range(20):
            out = quantizer(torch.cat([-torch.rand(8, 1, 8, 8), torch.randn(8, 3, 8, 8)], 1))  # never towards +x
        return int((codebook_histogram(out.ids, 64) == 0).sum())

    assert dead_after(0.0) > 28
    assert dead_after(0.1) < 10


def test_vq_does_not_move_in_eval_or_without_gradients():
    quantizer = VQ(8, VQConfig(codes=16))
    before = {name: value.clone() for name, value in quantizer.state_dict().items()}
    z = torch.randn(2, 8, 4, 4)
    with torch.no_grad():
        quantizer(z)
    quantizer.eval()(z)
    assert all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())


# LFQ ---------------------------------------------------------------------------------------------------------------


def full_entropies(features: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By the definition, over all codes of every token."""
    bits = features.shape[1]
    tokens = features.permute(0, 2, 3, 1).reshape(-1, bits)
    codes = torch.tensor([[1.0 if code >> i & 1 else -1.0 for i in range(bits)] for code in range(2**bits)])
    p = torch.softmax(-torch.cdist(tokens, codes).square() / temperature, -1)
    return torch.special.entr(p).sum(-1).mean(), torch.special.entr(p.mean(0)).sum()


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_lfq_entropies_are_those_over_all_codes(bits):
    quantizer = LFQ(8, LFQConfig(codes=2**bits, temperature=0.7))
    features = torch.randn(2, bits, 3, 4, requires_grad=True)
    found, expected = quantizer.entropies(features), full_entropies(features, 0.7)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, atol=1e-4)
    weights = (1.0, -0.6)
    (mine,) = torch.autograd.grad(sum(w * x for w, x in zip(weights, found)), features)
    (theirs,) = torch.autograd.grad(sum(w * x for w, x in zip(weights, expected)), features)
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_lfq_agrees_with_the_library():
    library = vector_quantize_pytorch.LFQ(
        codebook_size=64, entropy_loss_weight=0.3, diversity_gamma=2.0, commitment_loss_weight=0.5
    )
    config = LFQConfig(codes=64, entropy=0.3, diversity=2.0, commitment=0.5, temperature=0.5)
    quantizer = no_projection(LFQ(6, config))
    z = torch.randn(2, 6, 4, 4)
    theirs = library(z, inv_temperature=1 / 0.5)
    ours = quantizer(z)
    assert torch.allclose(ours.z, theirs.quantized)
    assert torch.allclose(ours.loss, theirs.entropy_aux_loss, atol=2e-3)  # it clamps logarithms at 1e-5


def test_lfq_never_makes_a_tokens_by_codes_tensor():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.seen = max(self.seen, tensor.numel())
            return out

    quantizer = LFQ(16, LFQConfig(codes=65536))
    z = torch.randn(4, 16, 16, 16, requires_grad=True)  # 1,024 tokens: 67 million probabilities in full
    with Largest() as largest:
        out = quantizer(z)
        (out.z.sum() + out.loss).backward()
    assert largest.seen <= 1024 * 256


def test_lfq_descent_spreads_code_use():
    torch.manual_seed(0)
    quantizer = LFQ(8, LFQConfig(codes=256, entropy=1.0, temperature=1.0, commitment=0.1))
    z = torch.randn(16, 8, 4, 4) + torch.randn(8, 1, 1) * 3  # off centre: few codes at first
    before = codebook_usage(codebook_histogram(quantizer(z).ids, 256))["perplexity"]
    optimizer = torch.optim.Adam(quantizer.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        quantizer(z).loss.backward()
        optimizer.step()
    after = codebook_usage(codebook_histogram(quantizer(z).ids, 256))["perplexity"]
    assert after > 2 * before


def test_lfq_entropy_is_finite_for_sure_tokens():
    features = (torch.randint(0, 2, (2, 16, 4, 4)) * 2.0 - 1).requires_grad_()
    quantizer = LFQ(8, LFQConfig(temperature=0.01))
    unsure, spread = quantizer.entropies(features)
    (unsure - spread).backward()
    assert torch.isfinite(features.grad).all()
    assert unsure < 1e-6
    assert spread.item() == pytest.approx(math.log(32), abs=1e-3)  # 32 tokens, all different


# FSQ ---------------------------------------------------------------------------------------------------------------


def test_fsq_agrees_with_the_library():
    library = vector_quantize_pytorch.FSQ([8, 6, 5])
    quantizer = no_projection(build_quantizer(3, FSQConfig(levels=(8, 6, 5))))
    z = torch.randn(2, 3, 8, 8) * 2
    theirs, ids = library(z)
    ours = quantizer(z)
    assert torch.allclose(ours.z, theirs)
    assert torch.equal(ours.ids, ids.long())
    assert ours.loss == 0


def test_fsq_reaches_every_value_of_every_level():
    quantizer = no_projection(build_quantizer(3, FSQConfig(levels=(8, 5, 3))))
    ids = quantizer(torch.randn(64, 3, 32, 32) * 3).ids
    assert codebook_usage(codebook_histogram(ids, 120))["use"] == 1


# Config, use, ranks ------------------------------------------------------------------------------------------------


class Holder(Config):
    quantizer: QuantizerConfig = VQConfig()


def test_kind_decides_which_keys_there_are():
    assert parse(Holder, {"quantizer": {"codes": 77}}).quantizer == VQConfig(codes=77)
    assert parse(Holder, {"quantizer": {"kind": "fsq", "levels": [4, 4]}}).quantizer == FSQConfig(levels=(4, 4))
    with pytest.raises(ConfigError, match="levels"):
        parse(Holder, {"quantizer": {"kind": "lfq", "levels": [4, 4]}})
    with pytest.raises(ConfigError, match="512 or 1024"):
        parse(Holder, {"quantizer": {"kind": "lfq", "codes": 1000}})
    with pytest.raises(ConfigError, match="at least 3"):
        parse(Holder, {"quantizer": {"kind": "fsq", "levels": [2, 4]}})


def test_usage_of_known_histograms():
    ids = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    found = codebook_usage(codebook_histogram(ids, 8))
    assert found["use"] == 0.5
    assert found["perplexity"] == pytest.approx(4)
    joined = codebook_histogram(ids[:1], 8) + codebook_histogram(ids[1:], 8)
    assert torch.equal(joined, codebook_histogram(ids, 8))
    assert codebook_usage(torch.tensor([10, 0, 0, 0]))["perplexity"] == pytest.approx(1)


def _on_rank(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
    results = _two_steps(slice(rank * 4 // world, (rank + 1) * 4 // world))
    if rank == 0:
        save_file({name: value.contiguous() for name, value in results.items()}, f"{path}/result.safetensors")
    dist.destroy_process_group()


def _two_steps(rows: slice) -> dict[str, torch.Tensor]:
    """Two training steps on these rows of a fixed batch; gradients joined as the trainer joins them."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8, 3, 3)
    found: dict[str, torch.Tensor] = {}
    for config in (VQConfig(codes=12, dim=4, revive=0.5), LFQConfig(codes=64, temperature=1.0)):
        torch.manual_seed(1)
        quantizer = build_quantizer(8, config)
        for step in range(2):
            torch.manual_seed(2 + step)
            out = quantizer(batch[rows])
        (out.loss * (rows.stop - rows.start)).backward()
        gradient = quantizer.project_in.weight.grad
        if dist.is_initialized():
            dist.all_reduce(gradient)
        found[config.kind] = gradient / 4
        found |= {f"{config.kind}.{name}": value.float() for name, value in quantizer.named_buffers()}
    return found


def test_two_ranks_make_the_statistics_of_one(tmp_path):
    mp.start_processes(_on_rank, (2, str(tmp_path)), nprocs=2, start_method="fork")
    together, alone = load_file(tmp_path / "result.safetensors"), _two_steps(slice(0, 4))
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.allclose(together[name], value, atol=1e-5), name


def test_vq_codebook_survives_a_batch_that_is_not_finite():
    torch.manual_seed(0)
    quantizer = build_quantizer(8, VQConfig(codes=16, dim=4)).train()
    quantizer(torch.randn(2, 8, 4, 4))
    before, mass = quantizer.codebook.clone(), quantizer.mass.clone()
    quantizer(torch.full((2, 8, 4, 4), float("nan")))
    assert torch.equal(quantizer.codebook, before) and torch.equal(quantizer.mass, mass)
