"""Token critics: the one inside Muse and the one as a stage."""

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.batch import Prompts, Shape
from kineograph.core.capabilities import SupportsSampling
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, freeze, player_parameters
from kineograph.family.muse import MuseSample
from kineograph.family.muse.config import CriticConfig
from kineograph.family.muse.critic import MuseCritic
from kineograph.process.masking import mask_tokens

from .conftest import CAPTIONS, PatchCodec, batch_of, train


@pytest.fixture
def generator(make):
    muse = make()
    train(muse, batch_of(8), 20)
    return freeze(muse)


def make_critic(generator, **keys) -> MuseCritic:
    torch.manual_seed(1)
    config = CriticConfig(task="muse.critic", generator="generator", **{"width": 32, "depth": 1, "heads": 2, **keys})
    return MuseCritic.build(config, BuildContext(Shape(1, 16, 16, 3, 8.0), stage={"generator": generator}.__getitem__))


def test_found_by_name():
    assert find_task("muse.critic") is MuseCritic


def test_only_resampled_tokens_change_and_are_scored(generator, batch, noise):
    tokens, condition = generator.get_tokens(batch), generator.encode_batch(batch)
    masked, rows = generator.predict(tokens, condition, noise)
    filled, wrong = generator.resample_masked(rows, masked, tokens, noise)
    mask = mask_tokens(noise, 16).mask
    assert torch.equal(filled[~mask], tokens[~mask])
    assert (filled < generator.mask_id).all()
    critic = make_critic(generator).eval()  # in training some captions are dropped
    scores = critic.score_tokens(filled, condition)[..., 0]
    expected = F.binary_cross_entropy_with_logits(scores[mask], (filled != tokens)[mask].float())
    loss = critic.loss("model", critic(batch, noise))
    torch.testing.assert_close(loss.total.value(), expected)
    assert float(loss.total.count) == int(mask.sum())
    torch.testing.assert_close(loss.terms["wrong"].value(), (filled != tokens)[mask].float().mean())
    assert bool(wrong[masked.weights == 0].any()) is False


def test_critic_learns_and_the_generator_stays_frozen(generator):
    critic = make_critic(generator)
    before = {name: p.clone() for name, p in critic.named_parameters()}
    frozen = {name: p.clone() for name, p in generator.named_parameters()}
    assert player_parameters(critic, "model").keys() == before.keys()
    losses = train(critic, batch_of(8), 30)
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.2
    assert all(not torch.equal(before[name], p) for name, p in critic.named_parameters() if p.grad.abs().sum() > 0)
    assert all(torch.equal(frozen[name], p) for name, p in generator.named_parameters())
    assert not any(name.startswith("generator") for name in critic.state_dict())


def test_sampling_uses_generator_and_critic(generator, monkeypatch):
    critic = make_critic(generator).eval()
    prompts = Prompts(Noise.for_rows(0, 0, 4), CAPTIONS[:4])
    options = MuseSample(steps=5, critic_noise=0.0)
    drawn = critic.sample(prompts, options)
    assert drawn.shape == (4, 1, 3, 16, 16)
    assert isinstance(critic, SupportsSampling)
    with torch.no_grad():
        critic.score.weight.neg_()  # opposite scores
    assert not torch.equal(drawn, critic.sample(prompts, options))
    assert not torch.equal(drawn, generator.sample(prompts, options))


def test_temperature_changes_the_share_of_wrong_tokens(generator, batch, noise):
    hot, cold = (make_critic(generator, temperature=t)(batch, noise).wrong for t in (5.0, 0.05))
    assert float(hot) > float(cold)


def test_other_stages_are_refused():
    with pytest.raises(ConfigError, match="generator=generator is no muse stage"):
        make_critic(PatchCodec())


def test_validation_is_deterministic(generator, batch, noise):
    critic = make_critic(generator).eval()
    with torch.no_grad():
        a, b = (critic.validate(batch, noise)["loss"].value() for _ in range(2))
    assert torch.equal(a, b)


def test_a_critic_of_a_super_resolution_stage_reads_its_low_res_tokens(make, codec):
    large = freeze(make(stages={"small": codec}, size=32, low_res="small"))
    critic = make_critic(large)
    batch = batch_of(2, size=32)
    tokens, condition = large.get_tokens(batch), large.encode_batch(batch)
    changed = condition._replace(low_res=(condition.low_res + 3) % 16)
    before, after = (critic.score_tokens(tokens, given) for given in (condition, changed))
    assert not torch.allclose(before, after, atol=1e-4)


# Self-critic -----------------------------------------------------------------------------------------------------


def test_self_critic_is_scored_at_masked_positions_only(make, batch, noise):
    muse = make(critic="self", critic_weight=0.5).eval()
    loss = muse.loss("model", muse(batch, noise))
    tokens, condition = muse.get_tokens(batch), muse.encode_batch(batch)
    masked, rows = muse.predict(tokens, condition, noise)
    filled, _ = muse.resample_masked(rows, masked, tokens, noise)
    mask = masked.mask
    scores = muse.critic(muse.compute_hidden(filled, condition))[..., 0]
    expected = F.binary_cross_entropy_with_logits(scores[mask], (filled != tokens)[mask].float())
    torch.testing.assert_close(loss.terms["critic"].value(), expected)
    torch.testing.assert_close(loss.total.value(), loss.terms["cross_entropy"].value() + 0.5 * expected)


def test_self_critic_trains_and_steers_sampling(make):
    muse = make(critic="self")
    before = muse.critic.weight.clone()
    train(muse, batch_of(4), 10)
    assert not torch.equal(before, muse.critic.weight)
    prompts = Prompts(Noise.for_rows(0, 0, 4), CAPTIONS[:4])
    options = MuseSample(steps=5, critic_noise=0.0)
    drawn = muse.sample_tokens(prompts, options)
    with torch.no_grad():
        muse.critic.weight.neg_()
    assert not torch.equal(drawn, muse.sample_tokens(prompts, options))


def test_guidance_needs_the_dropout_of_the_generator(make):
    """Guidance is in the critic's config, caption_dropout in the generator's."""
    blind = freeze(make(caption_dropout=0.0, sample={"guidance": 1.0}))
    refused = r"generator=generator: sample\.guidance=3 needs a model trained with dropped conditions, and caption_dropout=0: set caption_dropout=0\.1"
    with pytest.raises(ConfigError, match=refused):
        make_critic(blind)
    critic = make_critic(blind, sample={"guidance": 1.0})
    prompts = Prompts(Noise.for_rows(0, 0, 1), CAPTIONS[:1])
    with pytest.raises(ConfigError, match=refused):  # kineo sample --guidance 3
        critic.sample(prompts, MuseSample(guidance=3.0, steps=1))
    critic.sample(prompts, MuseSample(guidance=1.0, steps=1))
    make_critic(freeze(make(caption_dropout=0.1)))
    # The initial weights may have been trained with dropout.
    make_critic(freeze(make(caption_dropout=0.0, init="runs/x/generator")))
    make_critic(freeze(make(caption_dropout=0.0, text={"kind": "none"})))


def test_a_self_critic_is_switched_off_when_drawing(make):
    task, prompts = make(critic="self").eval(), Prompts(Noise.for_rows(0, 0, 2), CAPTIONS[:2])
    plain = make().eval()
    plain.load_state_dict({name: value for name, value in task.state_dict().items() if not name.startswith("critic.")})
    with torch.no_grad():
        for model in (task, plain):
            model.head.weight.mul_(3)
    with_critic, without = (task.sample_tokens(prompts, MuseSample(steps=4, critic=on)) for on in (True, False))
    assert not torch.equal(with_critic, without)
    assert torch.equal(without, plain.sample_tokens(prompts, MuseSample(steps=4)))
