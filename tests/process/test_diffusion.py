import math

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DDPMScheduler
from torch import nn

from kineograph.core.config import parse
from kineograph.core.errors import ConfigError
from kineograph.process.diffusion import Diffusion, DiffusionConfig, discretized_log_likelihood

OBJECTIVES = ["eps", "x0", "v"]
BETAS = ["linear", "scaled_linear", "quadratic", "sigmoid"]


def make(**keys) -> Diffusion:
    return Diffusion(DiffusionConfig(**keys))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(times: list[int], channels: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x0 of 8 bits in [−1, 1], ε, t."""
    x0 = (drawn(len(times), channels, 6, 6, seed=1) * 60 + 128).round().clamp(0, 255) / 127.5 - 1
    return x0, drawn(*x0.shape, seed=2), torch.tensor(times)


# Levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("cosine", "squaredcos_cap_v2"),
        ("linear", "linear"),
        ("scaled_linear", "scaled_linear"),
        ("quadratic", "scaled_linear"),
        ("sigmoid", "sigmoid"),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_levels_are_those_of_diffusers(schedule, theirs, zero):
    config = DiffusionConfig(schedule=schedule, zero_terminal=zero, objective="v")
    start, end = config.beta_range if schedule != "cosine" else (1e-4, 0.02)
    reference = DDPMScheduler(beta_schedule=theirs, beta_start=start, beta_end=end, rescale_betas_zero_snr=zero)
    found = Diffusion(config)
    torch.testing.assert_close(found.alpha**2, reference.alphas_cumprod, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("zero", [False, True])
def test_levels_are_those_of_cogvideox(shift, zero):
    reference = CogVideoXDDIMScheduler(
        snr_shift_scale=shift, rescale_betas_zero_snr=zero, prediction_type="v_prediction"
    )
    found = make(schedule="scaled_linear", shift=shift, zero_terminal=zero, objective="v")
    torch.testing.assert_close(torch.tensor(found.alpha_bar).double(), reference.alphas_cumprod.double())
    x0, eps, t = batch([0, 3, 500, 999])
    torch.testing.assert_close(found.add_noise(x0, eps, t), reference.add_noise(x0, eps, t))
    torch.testing.assert_close(found.target(x0, eps, t), reference.get_velocity(x0, eps, t))


@pytest.mark.parametrize("schedule", ["cosine", *BETAS])
@pytest.mark.parametrize("steps", [10, 100, 1000, 4000])
def test_noise_grows_from_almost_none_to_almost_all_however_many_levels(schedule, steps):
    found = torch.tensor(make(schedule=schedule, steps=steps).alpha_bar, dtype=torch.float64)
    assert (found.diff() < 0).all() and found[-1] > 0
    assert found[0] > (0.9 if steps == 10 else 0.98)
    assert found[-1] < 0.01


def test_given_betas_are_taken_as_they_are():
    found = make(schedule="linear", steps=4, beta_start=0.1, beta_end=0.4)
    assert found.alpha_bar == pytest.approx([0.9, 0.9 * 0.8, 0.9 * 0.8 * 0.7, 0.9 * 0.8 * 0.7 * 0.6])


def test_shift_divides_the_signal_to_noise_ratio():
    plain, shifted = (torch.tensor(make(shift=s).alpha_bar, dtype=torch.float64) for s in (1.0, 3.0))
    torch.testing.assert_close(shifted / (1 - shifted) * 3, plain / (1 - plain))


def test_zero_terminal_leaves_no_signal_at_the_end_and_the_start_as_it_was():
    plain, zero = make(objective="v"), make(objective="v", zero_terminal=True)
    assert zero.alpha_bar[-1] == 0 and float(zero.sigma[-1]) == 1
    assert zero.alpha_bar[0] == pytest.approx(plain.alpha_bar[0])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"zero_terminal": True}, "set objective=v or objective=x0"),
        ({"zero_terminal": True, "objective": "v", "weighting": "min_snr"}, "would have weight 0; set weighting=none"),
        ({"beta_end": 0.02}, "schedule=cosine does not use beta_start"),
        ({"schedule": "linear", "beta_start": 0.5}, "beta_start=0.5 is above beta_end=0.02"),
        ({"weighting": "min_snr", "p2_k": 2.0}, "does not use p2_k: remove it, or set weighting=p2"),
        ({"vb_weight": 0.1}, "vb_weight has no effect without learned_variance=true"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(DiffusionConfig, keys)


# Objectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_right_answer_gives_back_the_data_at_every_level(objective, schedule):
    diffusion = make(objective=objective, schedule=schedule)
    t = torch.arange(0, 1000, 3)
    x0, eps = drawn(len(t), 5, seed=1), drawn(len(t), 5, seed=2)
    x, answer = diffusion.add_noise(x0, eps, t), diffusion.target(x0, eps, t)
    assert torch.equal(diffusion.to_x0(x, t, answer), x0) or objective != "x0"
    # float32 rounds x by 2⁻²⁴; dividing by α is all that may enlarge this
    rounding = 4 * 2.0**-23
    miss = (diffusion.to_x0(x, t, answer) - x0).abs().amax(1) * (diffusion.alpha[t] if objective == "eps" else 1)
    assert float(miss.max()) < 4 * rounding


@pytest.mark.parametrize("objective", ["x0", "v"])
def test_pure_noise_and_an_answer_are_data(objective):
    diffusion = make(objective=objective, zero_terminal=True)
    x0, eps, t = batch([999, 999])
    x = diffusion.add_noise(x0, eps, t)
    assert torch.equal(x, eps)
    torch.testing.assert_close(diffusion.to_x0(x, t, diffusion.target(x0, eps, t)), x0, atol=0, rtol=0)


def test_the_variance_half_is_no_part_of_the_answer():
    diffusion = make(learned_variance=True)
    x0, eps, t = batch([5, 700])
    x = diffusion.add_noise(x0, eps, t)
    torch.testing.assert_close(diffusion.to_x0(x, t, torch.cat([eps, x0], 1)), x0, atol=1e-4, rtol=1e-4)
    assert diffusion.output_channels(3) == 6 and make().output_channels(3) == 3


# Weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["min_snr", "p2"])
def test_a_weight_is_the_same_whatever_the_network_answers(weighting):
    """The same wrong x̂0, told as ε, x0 or v, costs the same: weights are stated for one objective and derived for the others."""
    keys = {"weighting": weighting} | (
        {"min_snr_gamma": 4.0} if weighting == "min_snr" else {"p2_gamma": 0.7, "p2_k": 2.0}
    )
    x0, eps, t = batch([1, 100, 400, 700, 950])
    wrong = x0 + 0.1 * drawn(*x0.shape, seed=3)
    losses = []
    for objective in OBJECTIVES:
        diffusion = make(objective=objective, **keys)
        x = diffusion.add_noise(x0, eps, t)
        alpha, sigma = (table[t].view(-1, *[1] * (x.dim() - 1)) for table in (diffusion.alpha, diffusion.sigma))
        implied = (x - alpha * wrong) / sigma  # ε
        losses.append(diffusion.loss(diffusion.target(wrong, implied, t), x0, eps, x, t))
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=1e-3)
    torch.testing.assert_close(losses[2], losses[1], atol=0, rtol=1e-3)
    ratio = (diffusion.alpha / diffusion.sigma)[t].double() ** 2
    miss = ((wrong - x0) ** 2).flatten(1).mean(1).double()
    stated = miss * ratio.clamp(max=4) if weighting == "min_snr" else miss * ratio / (2 + ratio) ** 0.7
    torch.testing.assert_close(losses[1].double(), stated, atol=0, rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_plain_loss_is_the_squared_error_in_float32(objective):
    diffusion = make(objective=objective)
    x0, eps, t = batch([0, 40, 999])
    x, output = diffusion.add_noise(x0, eps, t), drawn(3, 3, 6, 6, seed=3).bfloat16()
    found = diffusion.loss(output, x0, eps, x, t)
    assert found.dtype == torch.float32 and found.shape == (3,)
    torch.testing.assert_close(found, ((output.float() - diffusion.target(x0, eps, t)) ** 2).mean((1, 2, 3)))


# The bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_bound_is_zero_for_the_true_posterior(objective):
    diffusion = make(objective=objective, learned_variance=True)
    x0, eps, t = batch([1, 2, 50, 500, 998])
    x = diffusion.add_noise(x0, eps, t)
    output = torch.cat([diffusion.target(x0, eps, t), torch.full_like(x0, -1.0)], 1)  # share 0: β̃
    assert float(diffusion.variational_bound(output, x0, x, t).abs().max()) < 1e-6


def test_the_bound_is_the_divergence_of_torch():
    diffusion = make(objective="v", learned_variance=True, schedule="linear")
    x0, eps, t = batch([1, 30, 600, 999])
    x, output = diffusion.add_noise(x0, eps, t), drawn(4, 6, 6, 6, seed=3)
    output[:, 3:].tanh_()  # shares between the bounds
    kept = torch.tensor([1.0, *diffusion.alpha_bar], dtype=torch.float64)
    now, before = (kept[t + 1].view(-1, 1, 1, 1), kept[t].view(-1, 1, 1, 1))
    beta = 1 - now / before
    posterior = beta * (1 - before) / (1 - now)

    def mean(data):
        return before.sqrt() * beta / (1 - now) * data + (1 - beta).sqrt() * (1 - before) / (1 - now) * x.double()

    share = (output[:, 3:].double() + 1) / 2
    variance = (share * beta.log() + (1 - share) * posterior.log()).exp()
    guess = now.sqrt() * x.double() - (1 - now).sqrt() * output[:, :3].double()
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(
        normal(mean(x0.double()), posterior.sqrt()), normal(mean(guess), variance.sqrt())
    )
    wanted = wanted.mean((1, 2, 3)) / math.log(2)
    torch.testing.assert_close(diffusion.variational_bound(output, x0, x, t).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", ["x0", "v"])
def test_the_bound_of_a_model_does_not_depend_on_how_it_answers(objective):
    noise, other = make(learned_variance=True), make(objective=objective, learned_variance=True)
    x0, eps, t = batch([0, 1, 20, 500, 900])
    x = noise.add_noise(x0, eps, t)
    said, variance = eps + 0.1 * drawn(*eps.shape, seed=3), drawn(*eps.shape, seed=4)
    same = other.target(noise.to_x0(x, t, torch.cat([said, said], 1)), said, t)
    a = noise.variational_bound(torch.cat([said, variance], 1), x0, x, t)
    b = other.variational_bound(torch.cat([same, variance], 1), x0, x, t)
    assert (a > 1e-5).all()
    torch.testing.assert_close(a, b, atol=0, rtol=1e-3)


def test_the_bound_teaches_the_variance_alone():
    diffusion = make(learned_variance=True, vb_weight=0.01)
    x0, eps, t = batch([0, 1, 500, 999])
    x = diffusion.add_noise(x0, eps, t)
    output = (3 * drawn(4, 6, 6, 6, seed=3)).requires_grad_()
    diffusion.variational_bound(output, x0, x, t).sum().backward()
    assert output.grad is not None and output.grad.isfinite().all()
    assert not output.grad[:, :3].any() and output.grad[:, 3:].abs().amax((1, 2, 3)).all()
    parts = diffusion.squared_error(output, x0, eps, t) + 0.01 * 1000 * diffusion.variational_bound(output, x0, x, t)
    torch.testing.assert_close(diffusion.loss(output, x0, eps, x, t), parts)


@pytest.mark.parametrize("excess", [0.5, 9.0])
def test_descending_the_bound_finds_the_best_variance(excess):
    """With a mean that is off by a known amount the best Σ is β̃ + (distance of the means)², but never above β."""
    diffusion = make(objective="x0", learned_variance=True)
    t = torch.tensor([400])
    x0 = torch.zeros(1, 1, 4)
    before, now = diffusion.alpha_bar[399], diffusion.alpha_bar[400]
    beta = 1 - now / before
    low = beta * (1 - before) / (1 - now)
    off = math.sqrt(excess * (beta - low)) * (1 - now) / (math.sqrt(before) * beta)  # so that Σ = β̃ + excess (β − β̃)
    share = torch.zeros(1, 1, 4, requires_grad=True)
    optimizer = torch.optim.LBFGS([share], max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = diffusion.variational_bound(torch.cat([torch.full_like(x0, off), share], 1), x0, x0, t).sum() * 1e4
        loss.backward()
        return loss

    optimizer.step(closure)
    found = diffusion.log_variance(torch.cat([x0, share], 1), t).exp()
    best = low + min(excess, 1.0) * (beta - low)
    torch.testing.assert_close(found, torch.full_like(found, best), atol=0, rtol=1e-5)


@pytest.mark.parametrize("deviation", [0.3, 0.01, 0.002])
@pytest.mark.parametrize("mean", [-1.0, -0.3, 0.0, 0.98])
def test_the_decoder_spreads_a_mass_of_one_over_256_values(deviation, mean):
    values = torch.arange(256) / 127.5 - 1
    found = discretized_log_likelihood(values, values - mean, torch.full_like(values, 2 * math.log(deviation)))
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)
    normal = torch.distributions.Normal(torch.tensor(mean).double(), deviation)
    edges = torch.cat([torch.tensor([-40.0]), (values[1:] + values[:-1]) / 2, torch.tensor([40.0])]).double()
    wanted = normal.cdf(edges).diff()
    torch.testing.assert_close(found.exp().double(), wanted, atol=2e-5, rtol=2e-3)


def test_the_decoder_keeps_its_digits_and_gradient_far_out():
    log_variance = torch.full((2,), -10.0, requires_grad=True)
    found = discretized_log_likelihood(
        torch.tensor([0.0, 1.0]), torch.tensor([-2.0, 2.0]), log_variance
    )  # 300 deviations away
    found.sum().backward()
    assert (found < -4e4).all() and found.isfinite().all()
    assert log_variance.grad is not None and (log_variance.grad > 1e4).all()


def test_the_first_term_is_the_likelihood_of_the_data():
    diffusion = make(objective="x0", learned_variance=True)
    x0, eps, t = batch([0])
    x = diffusion.add_noise(x0, eps, t)
    output = torch.cat([x0 + 0.002, torch.ones_like(x0)], 1)  # share 1: β
    expected = -discretized_log_likelihood(
        x0, torch.full_like(x0, -0.002), diffusion.log_beta[0].expand_as(x0)
    ).mean() / math.log(2)
    torch.testing.assert_close(diffusion.variational_bound(output, x0, x, t), expected[None], atol=1e-4, rtol=1e-4)


# As a module -----------------------------------------------------------------------------------------------------


def test_tables_stay_float32_and_out_of_checkpoints():
    diffusion, same = make(), make()
    model = nn.Sequential(nn.Linear(2, 2), diffusion).to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    for name, table in same.named_buffers():
        assert torch.equal(getattr(diffusion, name), table) and table.dtype == torch.float32
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_training_asks_the_device_nothing():
    """Meta tensors have no values: a look at one would raise."""
    diffusion = make(objective="v", learned_variance=True).to("meta")
    x0 = torch.empty(2, 3, 4, 4, device="meta")
    t = torch.empty(2, dtype=torch.int64, device="meta")
    x = diffusion.add_noise(x0, x0, t)
    assert diffusion.loss(torch.cat([x, x], 1), x0, x0, x, t).shape == (2,)


def test_the_loss_is_one_graph():
    diffusion = make(objective="v", learned_variance=True)
    x0, eps, t = batch([0, 300])
    x, output = diffusion.add_noise(x0, eps, t), drawn(2, 6, 6, 6, seed=3)
    compiled = torch.compile(diffusion.loss, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(output, x0, eps, x, t), diffusion.loss(output, x0, eps, x, t))
