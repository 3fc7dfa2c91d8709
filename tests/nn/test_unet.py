"""The U-Net: shapes, what reaches which level, the efficient form, recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.nn.unet import PixelAttention, ResidualBlock, Unet, UnetConfig
from kineograph.train.activation_checkpointing import checkpoint_activations

SMALL = {"width": 16, "multipliers": (1, 2, 3), "blocks": (1,), "head_width": 16}


def make(channels_in: int = 3, channels_out: int = 3, context: int | None = 8, **keys: object) -> Unet:
    torch.manual_seed(0)
    return lively(Unet(parse(UnetConfig, SMALL | keys), channels_in, channels_out, context)).eval()


def lively(module: Unet) -> Unet:
    """No branch silent, as after some training."""
    for p in module.parameters():
        if p.ndim > 1 and not p.any():
            nn.init.normal_(p, std=0.05)
    return module


def given(rows: int = 2, size: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(rows, 3, size, size),
        "t": torch.tensor([3, 700][:rows]),
        "context": torch.randn(rows, 5, 8),
    }


@pytest.mark.parametrize(
    "keys", [{}, {"efficient": True}, {"blocks": (2, 1, 3)}, {"norm": "channel"}, {"patch": 2}, {"multipliers": (1,)}]
)
def test_shapes(keys):
    unet = make(channels_out=6, **keys)
    assert unet(**given()).shape == (2, 6, 16, 16)
    assert unet(**given(size=8) | {"x": torch.randn(2, 3, 8, 24)}).shape == (2, 6, 8, 24)


def test_starts_by_answering_nothing():
    torch.manual_seed(0)
    unet = Unet(parse(UnetConfig, SMALL), 3, 3, 8)
    assert not unet(**given()).any()


def test_blocks_start_by_adding_nothing():
    torch.manual_seed(0)
    config = parse(UnetConfig, SMALL)
    x, vector = torch.randn(2, 16, 4, 4), torch.randn(2, 64)
    assert torch.equal(ResidualBlock(16, 16, 64, config)(x, vector), x)
    assert torch.equal(PixelAttention(16, config, True, 8)(x, torch.randn(2, 5, 8), None), x)


def test_every_parameter_takes_a_gradient():
    unet = make(efficient=True)
    unet(**given()).square().mean().backward()
    assert [name for name, p in unet.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_odd_sizes_are_refused_with_sizes_that_fit():
    config = parse(UnetConfig, SMALL)
    config.check_size(16, 20)
    with pytest.raises(ConfigError, match=r"data\.size=16×18.*downsamples 4 times.*multiples of 4, such as 16×16"):
        config.check_size(16, 18)
    for keys in ({"efficient": True}, {"patch": 2}):
        with pytest.raises(ConfigError, match="multiples of 8"):
            parse(UnetConfig, SMALL | keys).check_size(20, 20)


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(ConfigError, match="blocks has 2 values for 3 levels"):
        parse(UnetConfig, SMALL | {"blocks": (1, 2)})


def test_attention_stands_where_the_flags_say():
    unet = make(self_attention=(False, False, True), cross_attention=(False, True, True))
    found = [
        (level.attention is not None and level.attention.own is not None, level.attention is not None)
        for level in unet.down
    ]
    assert found == [(False, False), (False, True), (True, True)]
    assert unet.middle_attention.own is not None and unet.middle_attention.cross is not None
    assert make(middle_attention=False).middle_attention.own is None
    assert make(middle_attention=False, context=None).middle_attention is None


def test_a_context_reaches_every_attention_level():
    unet = make(cross_attention=(True, True, True))
    whole = given()
    changed = whole | {"context": whole["context"] + 1}
    outputs: dict[int, list[torch.Tensor]] = {}
    for number, attention in enumerate(unet.attentions()):
        attention.register_forward_hook(
            lambda module, args, out, number=number: outputs.setdefault(number, []).append(out - args[0])
        )
    for inputs in (whole, changed):
        unet(**inputs)
    assert len(outputs) == 7  # three levels, twice, and the middle
    for attention, (before, after) in zip(unet.attentions(), outputs.values(), strict=True):
        assert attention.cross is not None
        assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("level", range(7))
def test_each_attention_alone_carries_the_context_to_the_output(level):
    unet = make(cross_attention=(True, True, True))
    for number, attention in enumerate(unet.attentions()):
        if number != level:
            nn.init.zeros_(attention.cross.out.weight)
    whole = given()
    a, b = unet(**whole), unet(**whole | {"context": whole["context"] + 1})
    assert (a - b).abs().max() > 1e-5


def test_memory_of_a_context_is_the_context():
    unet, whole = make(), given()
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    wanted = unet(**whole, mask=mask)
    context = whole.pop("context")
    assert torch.allclose(unet(**whole, mask=mask, memory=unet.memory(context)), wanted, atol=1e-6)
    context[0, 3:] += 5  # behind the mask
    assert torch.allclose(unet(**whole, context=context, mask=mask), wanted, atol=1e-6)


def test_time_and_what_is_added_to_it_matter():
    unet, whole = make(), given()
    a = unet(**whole)
    assert (a - unet(**whole | {"t": whole["t"] + 50})).abs().max() > 1e-4
    assert (a - unet(**whole, added=torch.ones(2, unet.vector))).abs().max() > 1e-4


def test_rows_do_not_touch_one_another():
    unet, whole = make(), given()
    alone = unet(**{name: value[:1] for name, value in whole.items()})
    assert torch.allclose(unet(**whole)[:1], alone, atol=1e-5)


def test_efficient_form_works_at_half_size_and_still_sees_every_pixel():
    unet = make(efficient=True)
    sizes = []
    for block in unet.down[0].blocks:
        block.register_forward_hook(lambda module, args, out: sizes.append(out.shape[-1]))
    whole = given()
    a = unet(**whole)
    assert sizes == [8]
    changed = whole["x"].clone()
    changed[:, :, 5, 7] += 1
    difference = (unet(**whole | {"x": changed}) - a).abs()[:, :, 5, 7]
    assert difference.min() > 0


def test_patches_are_folded_and_unfolded():
    unet = make(channels_in=1, channels_out=1, context=None, patch=2)
    sizes = []
    unet.down[0].blocks[0].register_forward_hook(lambda module, args, out: sizes.append(out.shape[-1]))
    unet(torch.randn(1, 1, 16, 16), torch.zeros(1))
    assert sizes == [8]


def test_recomputing_blocks_gives_the_same_gradients():
    gradients = []
    for again in (False, True):
        unet = make(efficient=True)
        if again:
            for part in unet.checkpoint_units():
                checkpoint_activations(part)
        unet(**given()).square().mean().backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert len(unet.checkpoint_units()) > 10
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_maps_stay_in_channels_last():
    unet, formats = make(), []
    for part in unet.checkpoint_units():
        part.register_forward_hook(
            lambda module, args, out: formats.append(out.is_contiguous(memory_format=torch.channels_last))
        )
    unet(**given())
    assert formats and all(formats)
