"""Token critics: a head on the generator, a separate network, a separate stage; and which parts train."""

import pytest
import torch
import torch.nn.functional as F

from kineograph.core.batch import Batch, Prompts
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, freeze, load_weights, player_parameters, task_state_dict
from kineograph.family.phenaki import PhenakiSample
from kineograph.family.phenaki.config import CriticConfig
from kineograph.family.phenaki.critic import PhenakiCritic
from kineograph.process.masking import mask_tokens
from kineograph.train.config import TrainConfig
from kineograph.train.stepper import Stepper

from .conftest import CAPTIONS, ClipCodec, batch_of, moved, train, weights


def step_once(task, batch, steps: int = 2) -> None:
    """The trainer's own optimizers: what is in none of them does not move."""
    stepper = Stepper(task, TrainConfig(steps=10, batch_size=len(batch), lr=1e-2, warmup=0, compile=False))
    task.train()
    for step in range(steps):
        stepper.step(step, [batch])


GENERATOR, CRITIC = {"network", "head", "text"}, {"critic"}


@pytest.mark.parametrize(
    ("keys", "players", "learning"),
    [
        ({"critic": "none"}, ("generator",), GENERATOR),
        ({"critic": "self"}, ("generator",), GENERATOR | CRITIC),
        ({"critic": "network"}, ("generator", "critic"), GENERATOR | CRITIC),
        ({"critic": "network", "only": "generator"}, ("generator",), GENERATOR),
        ({"critic": "network", "only": "critic", "init": "x"}, ("critic",), CRITIC),
        ({"critic": "self", "only": "generator"}, ("generator",), GENERATOR),
        ({"critic": "self", "only": "critic", "init": "x"}, ("critic",), CRITIC),
    ],
)
def test_only_trained_parameters_change(make, batch, keys, players, learning):
    task = make(caption_dropout=0.5, **keys)  # so that two steps include the null text
    assert task.players == players
    owned = {name for player in players for name in player_parameters(task, player)}
    assert {name.partition(".")[0] for name in owned} == learning
    before = weights(task)
    step_once(task, batch)
    assert moved(task, before) == owned
    assert task_state_dict(task).keys() >= before.keys()  # untrained parts are saved too: sampling needs them


def test_untrained_parts_have_no_dropout(make, batch, noise):
    task = make(critic="network", only="critic", init="x", dropout=0.5, critic_depth=1)
    task.train()
    assert task.critic.training
    assert not task.network.training
    first, second = (task(batch, noise).critic.clips.tokens for _ in range(2))
    assert torch.equal(first, second)
    found = task.loss("critic", task(batch, noise))
    assert not torch.equal(found.total.sum, task.loss("critic", task(batch, noise)).total.sum)


def test_the_critics_loss_reaches_only_the_critic(make, batch, noise):
    task = make(critic="network")
    shared = task(batch, noise)
    task.loss("critic", shared).total.value().backward()
    assert {name.partition(".")[0] for name, p in task.named_parameters() if p.grad is not None} == CRITIC
    assert all(p.grad is not None for p in task.critic.parameters())
    task.zero_grad(set_to_none=True)
    task.loss("generator", shared).total.value().backward()
    assert {name.partition(".")[0] for name, p in task.named_parameters() if p.grad is not None} == GENERATOR


@pytest.mark.parametrize("keys", [{"critic": "network"}, {"critic": "self", "only": "critic", "init": "x"}])
def test_only_masked_tokens_have_labels(make, batch, noise, keys):
    task = make(**keys).eval()
    shared = task(batch, noise)
    filled, tokens, mask = shared.critic.clips, task.get_clips(batch).tokens, mask_tokens(noise, 12).mask
    assert torch.equal(filled.tokens[~mask], tokens[~mask])
    assert (filled.tokens < task.mask_id).all()
    scores = task.score_tokens(filled, shared.critic.text)[..., 0]
    expected = F.binary_cross_entropy_with_logits(scores[mask], (filled.tokens != tokens)[mask].float())
    found = task.loss("critic", shared)
    torch.testing.assert_close(found.total.value(), expected)
    assert float(found.total.count) == int(mask.sum())
    torch.testing.assert_close(found.terms["wrong"].value(), (filled.tokens != tokens)[mask].float().mean())


def test_a_self_critic_is_part_of_the_generators_loss(make, batch, noise):
    task = make(critic="self", critic_weight=0.5).eval()
    shared = task(batch, noise)
    found = task.loss("generator", shared)
    tokens, mask = task.get_clips(batch).tokens, mask_tokens(noise, 12).mask
    scores = task.score_tokens(shared.critic.clips, shared.critic.text)[..., 0]
    expected = F.binary_cross_entropy_with_logits(scores[mask], (shared.critic.clips.tokens != tokens)[mask].float())
    torch.testing.assert_close(found.terms["critic"].value(), expected)
    torch.testing.assert_close(found.total.value(), found.terms["cross_entropy"].value() + 0.5 * expected)


def test_padding_is_never_scored(make):
    task = make(critic="network").eval()
    batch = batch_of(4)
    batch.frame_mask = torch.arange(5)[None] < torch.tensor([[1], [1], [3], [5]])
    noise = Noise(0, 1, batch.slots)
    before = task.loss("critic", task(batch, noise)).total
    batch.pixels[~batch.frame_mask] = 255
    after = task.loss("critic", task(batch, noise)).total
    assert torch.equal(before.sum, after.sum)
    assert float(before.count) <= 4 * (1 + 1 + 2 + 3)


def test_the_critics_shape(make):
    task = make(critic="network", critic_width=16, critic_depth=1, critic_heads=1)
    network = task.critic.network
    assert (network.width, len(network.transformer.blocks), network.head_width) == (16, 1, 16)
    assert len(make(critic="network").critic.network.transformer.blocks) == 2  # as the generator


# as a stage


def make_critic(generator, **keys) -> PhenakiCritic:
    torch.manual_seed(1)
    tree = {"task": "phenaki.critic", "generator": "generator", "width": 32, "depth": 1, "heads": 2, **keys}
    stages = {"generator": generator}
    return PhenakiCritic.build(
        parse(CriticConfig, tree), BuildContext(getattr(generator, "shape", None), stage=stages.__getitem__)
    )


@pytest.fixture
def generator(make):
    task = make()
    train(task, batch_of(8), 20)
    return freeze(task)


def test_found_by_name():
    assert find_task("phenaki.critic") is PhenakiCritic


def test_a_stage_learns_and_its_generator_does_not_move(generator):
    critic = make_critic(generator)
    before, frozen = weights(critic), weights(generator)
    assert player_parameters(critic, "model").keys() == before.keys()
    losses = train(critic, batch_of(8), 30)["model"]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.2
    assert moved(critic, before) == before.keys()
    assert not moved(generator, frozen)
    assert not any(name.startswith("generator") for name in critic.state_dict())


def test_a_critic_stage_equals_a_critic_inside_the_generator(make, generator, batch, noise):
    inside = make(critic="network", critic_depth=1)
    inside.load_state_dict(generator.state_dict() | inside.critic.state_dict(prefix="critic."))
    outside = make_critic(generator)
    outside.load_state_dict(inside.critic.state_dict(prefix="critic."))
    inside.eval()
    outside.eval()
    expected = inside.loss("critic", inside(batch, noise)).total
    found = outside.loss("model", outside(batch, noise)).total
    torch.testing.assert_close(found.value(), expected.value())


def test_options_of_the_stage(generator, batch, noise):
    hot, cold = (make_critic(generator, temperature=t)(batch, noise).wrong for t in (5.0, 0.05))
    assert float(hot) > float(cold)
    a, b = (make_critic(generator, rotary=rotary).eval()(batch, noise).sum for rotary in (True, False))
    assert not torch.equal(a, b)
    critic = make_critic(generator)
    assert critic.compile_targets() == [critic.critic.network]
    assert set(critic.blocks()) == set(critic.critic.network.transformer.blocks)
    assert critic.tokens_per_clip() == 12
    assert critic.stages["codec"] is generator.codec
    assert critic.can_continue()
    with pytest.raises(ConfigError, match="generator=generator is no phenaki stage"):
        make_critic(ClipCodec())


# in sampling


def prompts(rows: int = 4, **keys) -> Prompts:
    return Prompts(Noise.for_rows(0, 0, rows), CAPTIONS[:rows], **keys)


@pytest.mark.parametrize("kind", ["self", "network", "stage"])
def test_a_critic_decides_what_is_drawn_again_and_can_be_left_out(make, kind):
    generator = freeze(make())
    task = make_critic(generator) if kind == "stage" else make(critic=kind)
    task.eval()
    score = task.critic if kind == "self" else task.critic.score
    options = PhenakiSample(steps=5, critic_noise=0.0)
    drawn = task.sample(prompts(), options)
    assert drawn.shape == (4, 5, 3, 8, 8)
    without = task.sample(prompts(), options.model_copy(update={"critic": False}))
    assert not torch.equal(drawn, without)
    with torch.no_grad():
        score.weight.neg_()  # the opposite scores
    assert not torch.equal(drawn, task.sample(prompts(), options))
    assert torch.equal(without, task.sample(prompts(), options.model_copy(update={"critic": False})))
    if kind == "stage":
        assert torch.equal(without, generator.sample(prompts(), options))


@pytest.mark.parametrize("kind", ["self", "network"])
def test_an_untrained_critic_is_not_used(make, kind):
    def unlike(**keys) -> bool:
        task = make(critic=kind, only="generator", **keys).eval()
        drawn, without = (task.sample(prompts(), PhenakiSample(steps=5, critic=asked)) for asked in (True, False))
        return not torch.equal(drawn, without)

    assert not unlike()
    assert unlike(init="x")


@pytest.mark.parametrize("kind", ["self", "network"])
def test_a_critic_missing_from_init_is_not_used(make, kind):
    keys = {"critic": kind, "only": "generator", "init": "x"}

    def steered(task) -> bool:
        options = PhenakiSample(steps=5)
        unsteered = options.model_copy(update={"critic": False})
        return not torch.equal(task.eval().sample(prompts(), options), task.sample(prompts(), unsteered))

    notes: list[str] = []
    task = make(note=notes.append, **keys)
    task.remap_init(task_state_dict(make()), "stages.clips.init=x")
    assert not steered(task)
    assert notes == [f"stages.clips.init=x has no critic={kind} of this shape: clips are drawn without one"]
    again = make(assets=task.assets(), **keys)  # from its checkpoint, or as the start of another
    load_weights(again, task_state_dict(task))
    assert not steered(again)
    assert not any(name.startswith("critic") for name in task_state_dict(again))  # a file of its weights tells it too

    other = make(**keys, **({"critic_width": 16} if kind == "network" else {}))
    other.remap_init(task_state_dict(make(critic=kind)) | {"critic.weight": torch.zeros(1, 8)}, "x")
    assert not steered(other)  # of another shape
    given = make(**keys)
    given.remap_init(task_state_dict(make(critic=kind)), "x")
    assert steered(given) and not any("critic" in name for name in given.assets())
    learning = make(assets=task.assets(), critic=kind, only="critic", init="x")  # trained after a generator without
    learning.remap_init(task_state_dict(task), "x")
    assert steered(learning)


@pytest.mark.parametrize("kind", ["self", "network"])
def test_scores_in_sampling_equal_those_in_training(make, kind, codec):
    """With cached keys and values of the text, at the same tokens."""
    task = make(critic=kind).eval()
    from kineograph.family.phenaki.network import Clips
    from kineograph.family.phenaki.sampling import WindowSampler

    sampler = WindowSampler(task, prompts(), PhenakiSample(), task.critic, (8, 8))
    tokens = codec.encode(batch_of(4).video).flatten(1)
    with torch.no_grad():
        found = sampler.make_critic((3, 2, 2))(tokens, 0)
        expected = task.score_tokens(Clips(tokens, (3, 2, 2)), sampler.text)[..., 0]
    torch.testing.assert_close(found, expected)


def test_noise_on_the_critics_scores_and_its_schedule(make):
    task = make(critic="self").eval()

    def drawn(**keys):
        return task.sample(prompts(), PhenakiSample(steps=6, **keys))

    assert not torch.equal(drawn(critic_noise=0.0), drawn(critic_noise=50.0))
    falling, constant = (drawn(critic_noise=3.0, critic_noise_schedule=kind) for kind in ("falling", "constant"))
    assert not torch.equal(falling, constant)


def test_prime_frames_are_safe_from_a_critic(make, codec):
    task = make(critic="network").eval()
    prime = batch_of(4).video[:, :3]
    drawn = task.sample(prompts(prime=prime), PhenakiSample(steps=5))
    assert torch.equal(codec.encode(drawn[:, :3]), codec.encode(prime))


def test_a_batch_without_captions_is_judged_too(make):
    task = make(critic="network", text={"kind": "none"})
    batch = Batch(torch.arange(4), pixels=batch_of(4).pixels)
    losses = train(task, batch, 3)
    assert losses.keys() == {"generator", "critic"}
    assert task.sample(Prompts(Noise.for_rows(0, 0, 2)), PhenakiSample(steps=2)).shape == (2, 5, 3, 8, 8)


def test_guidance_without_dropout_is_refused_as_of_the_generator(make):
    """Guidance stands in the critic's config, the dropout in that of the generator that it draws with."""
    blind = freeze(make(caption_dropout=0.0, sample={"guidance": 1.0}))
    refused = r"generator=generator: sample\.guidance=3 needs a model trained with dropped conditions, and caption_dropout=0: set caption_dropout=0\.1"
    with pytest.raises(ConfigError, match=refused):
        make_critic(blind)
    critic = make_critic(blind, sample={"guidance": 1.0})
    prompts = Prompts(Noise.for_rows(0, 0, 1), CAPTIONS[:1])
    with pytest.raises(ConfigError, match=refused):  # kineo sample --guidance 3
        critic.sample(prompts, PhenakiSample(guidance=3.0, steps=1))
    critic.sample(prompts, PhenakiSample(guidance=1.0, steps=1))
    make_critic(freeze(make(caption_dropout=0.1)))
    make_critic(freeze(make(caption_dropout=0.0, init="runs/x/generator")))  # whose weights may know it
    make_critic(freeze(make(caption_dropout=0.0, text={"kind": "none"})))
