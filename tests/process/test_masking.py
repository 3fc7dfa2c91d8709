import itertools
import math

import pytest
import torch

from kineograph.core.noise import Noise
from kineograph.process.masking import (
    MaskedSample,
    draw_mask_ratios,
    mask_tokens,
    masked_counts,
    max_masked_rows,
    mean_mask_ratio,
    resample_masked,
    sample_tokens,
    sample_tokens_guided,
    score_critic,
)


def noise(rows: int, step: int = 0, first: int = 0, seed: int = 0) -> Noise:
    return Noise(seed, step, first + torch.arange(rows))


# hiding


def test_ratios_follow_the_cosine():
    drawn = torch.cat([draw_mask_ratios(noise(16, step)) for step in range(250)])
    expected = torch.cos((torch.arange(4000) + 0.5) / 4000 * math.pi / 2)  # γ of an even r
    torch.testing.assert_close(drawn.sort(descending=True).values, expected, atol=0.02, rtol=0)
    one = torch.stack([draw_mask_ratios(noise(16, step))[5] for step in range(600)])  # each sample by itself, too
    assert float(one.mean()) == pytest.approx(2 / math.pi, abs=0.02)


def test_at_least_one_token_is_hidden_and_counts_follow_the_ratio():
    for step in range(50):
        masked = mask_tokens(noise(8, step), 16)
        expected = (draw_mask_ratios(noise(8, step)) * 16).ceil().clamp(1, 16)
        assert torch.equal(masked.mask.sum(1).float(), expected)


def test_places_are_uniform():
    share = torch.stack([mask_tokens(noise(32, step), 10).mask.float().mean(0) for step in range(200)]).mean(0)
    torch.testing.assert_close(share, share.mean().expand(10), atol=0.03, rtol=0)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 64), (2, 64), (7, 64), (32, 256), (64, 64), (48, 100), (129, 16)])
def test_capacity_holds_all_hidden_tokens_of_neighbouring_slots(rows, tokens):
    limit = max_masked_rows(rows, tokens)
    assert limit <= rows * tokens
    for step in range(120):
        masked = mask_tokens(noise(rows, step, first=step * 13), tokens)
        assert masked.rows.shape == (limit,)
        assert int(masked.weights.sum()) == int(masked.mask.sum())


def test_capacity_spares_the_head_a_quarter_of_the_rows():
    assert max_masked_rows(32, 256) < 0.75 * 32 * 256


def test_scored_rows_are_the_hidden_places_each_once():
    masked = mask_tokens(noise(9, 3), 20)
    kept = masked.rows[masked.weights > 0]
    assert torch.equal(kept.sort().values, masked.mask.flatten().nonzero()[:, 0])
    assert len(set(masked.rows.tolist())) == len(masked.rows)


def test_more_than_fits_is_a_random_choice_of_hidden_places():
    far = Noise(0, 0, torch.zeros(64, dtype=torch.int64) + 3)  # one slot many times: all ratios alike
    step = next(step for step in range(50) if float(draw_mask_ratios(Noise(0, step, far.slots))[0]) > 0.95)
    masked = mask_tokens(Noise(0, step, far.slots), 32)
    assert int(masked.weights.sum()) == max_masked_rows(64, 32) < int(masked.mask.sum())
    assert masked.mask.flatten()[masked.rows].all()


def test_masks_belong_to_slots_not_to_batches():
    whole = mask_tokens(noise(8, 5), 30).mask
    parts = torch.cat([mask_tokens(noise(3, 5), 30).mask, mask_tokens(noise(5, 5, first=3), 30).mask])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, mask_tokens(noise(8, 6), 30).mask)


# finding


def test_counts_fall_from_all_to_none():
    for tokens, steps in ((256, 18), (16, 24), (64, 1)):
        counts = masked_counts(tokens, steps)
        assert counts[0] == tokens
        assert counts[-1] == 0
        assert len(counts) == steps + 1
        assert counts == sorted(counts, reverse=True)
        assert min(counts[:-1]) >= 1
    assert masked_counts(256, 18)[9] == math.floor(256 * math.cos(math.pi / 4))


class Oracle:
    """Logits that point at `truth`; remembers what it was shown."""

    def __init__(self, truth: torch.Tensor, vocabulary: int, sharpness: float = 50.0) -> None:
        self.logits = torch.nn.functional.one_hot(truth, vocabulary).float() * sharpness
        self.seen: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []

    def __call__(self, tokens, places, step):
        self.seen.append(tokens.clone())
        self.places.append(places)
        return self.logits.gather(1, places[..., None].expand(-1, -1, self.logits.shape[2]))


def truth(rows: int = 3, length: int = 20, vocabulary: int = 11) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def test_a_pace_above_one_finds_fewer_tokens_at_first_and_all_in_the_end():
    even, slow = masked_counts(576, 18), masked_counts(576, 18, pace=2.0)
    assert all(later < before for before, later in itertools.pairwise(slow))
    assert all(576 - a < 576 - b for a, b in zip(slow[1:18], even[1:18], strict=True) if a != b)
    assert slow[9] == math.floor(576 * math.cos(math.pi / 2 * 0.25))
    assert slow[-1] == 0


def test_a_mask_bias_hides_more_and_its_rows_still_fit():
    drawn = torch.cat([draw_mask_ratios(noise(16, step), bias=2.0) for step in range(250)])
    assert float(drawn.mean()) == pytest.approx(mean_mask_ratio(2.0), abs=0.005)
    assert mean_mask_ratio(1.0) == pytest.approx(2 / math.pi, abs=1e-6)
    assert mean_mask_ratio(2.0) == pytest.approx(0.7799, abs=1e-3)  # the Fresnel integral C(1)
    for step in range(40):
        masked = mask_tokens(noise(24, step, first=step * 24), 30, bias=2.0)
        assert int(masked.weights.sum()) == int(masked.mask.sum())


def test_an_oracle_is_followed_and_only_hidden_places_are_asked():
    oracle = Oracle(truth(), 11)
    found = sample_tokens(oracle, torch.full((3, 20), 11), mask_id=11, steps=6, noise=noise(3))
    assert torch.equal(found, truth())
    for seen, places, count in zip(oracle.seen, oracle.places, masked_counts(20, 6), strict=False):
        assert (seen == 11).sum(1).tolist() == [count] * 3
        assert (seen.gather(1, places) == 11).all()
        assert places.shape == (3, count)


@pytest.mark.parametrize("with_critic", [False, True])
def test_given_tokens_are_never_hidden(with_critic):
    given = torch.zeros(20, dtype=torch.bool)
    given[[0, 1, 7, 19]] = True
    start = torch.full((3, 20), 10)
    oracle = Oracle(truth(vocabulary=10), 12)
    critic = (
        (lambda tokens, step: (tokens == 10).float() * 100) if with_critic else None
    )  # a critic that hates what was given
    found = sample_tokens(oracle, start, mask_id=11, steps=5, noise=noise(3), fixed=given, critic=critic)
    assert (found[:, given] == 10).all()
    assert torch.equal(found[:, ~given], truth(vocabulary=10)[:, ~given])
    assert all((seen[:, given] == 10).all() for seen in oracle.seen)
    assert (oracle.seen[0] == 11).sum() == 3 * 16


@pytest.mark.parametrize("steps", [2, 3])
def test_one_token_a_step_in_random_order_draws_the_joint_distribution(steps):
    """Of `steps` tokens that depend on one another. Noise that drowns the confidence makes the order random."""
    rows, classes = 40_000, 3
    joint = torch.rand((classes,) * steps, generator=torch.Generator().manual_seed(1)) ** 3
    joint = joint / joint.sum()

    def denoise(tokens, positions, step):
        known = [tokens[:, place : place + 1] for place in range(steps)]
        agree = torch.ones(rows, *joint.shape)  # which values are possible, for each row
        for place, token in enumerate(known):
            value = torch.arange(classes).view([1] + [classes if axis == place else 1 for axis in range(steps)])
            token = token.view(-1, *[1] * steps)
            agree = agree * ((token == classes) | (token == value))
        possible = joint * agree
        each = torch.stack([possible.sum([1 + a for a in range(steps) if a != place]) for place in range(steps)], 1)
        return each.gather(1, positions[..., None].expand(-1, -1, classes)).log()

    start = torch.full((rows, steps), classes)
    noise = Noise.for_rows(0, 0, rows)
    found = sample_tokens(denoise, start, mask_id=classes, steps=steps, noise=noise, confidence_noise=1e6)
    index = (found * classes ** torch.arange(steps - 1, -1, -1)).sum(1)
    share = torch.bincount(index, minlength=classes**steps) / rows
    torch.testing.assert_close(share, joint.flatten(), atol=0.01, rtol=0)


def test_kept_tokens_stay_without_a_critic_and_may_be_redrawn_with_one():
    flat = Oracle(truth(), 11, sharpness=0.5)
    sample_tokens(flat, torch.full((3, 20), 11), mask_id=11, steps=6, noise=noise(3))
    for before, after in zip(flat.seen, flat.seen[1:], strict=False):
        assert torch.equal(before[before != 11], after[before != 11])
    judged = Oracle(truth(), 11, sharpness=0.5)
    sample_tokens(
        judged,
        torch.full((3, 20), 11),
        mask_id=11,
        steps=6,
        noise=noise(3),
        critic=lambda tokens, step: (tokens != truth()).float() * 9,
    )
    pairs = list(zip(judged.seen, judged.seen[1:], strict=False))
    assert any(((before != 11) & (after == 11)).any() for before, after in pairs)


def test_a_critic_mends_what_the_model_gets_wrong():
    def right(critic):
        oracle = Oracle(truth(), 11, sharpness=2.0)
        found = sample_tokens(
            oracle, torch.full((3, 20), 11), mask_id=11, steps=12, noise=noise(3), critic=critic, critic_noise=0.0
        )
        return float((found == truth()).float().mean())

    assert right(lambda tokens, step: (tokens != truth()).float()) > right(None) + 0.2


def test_chunks_of_a_batch_draw_alike_and_seeds_differ():
    def found(rows, first=0, seed=0, **keys):
        oracle = Oracle(truth()[first : first + rows], 11, sharpness=1.0)
        return sample_tokens(
            oracle, torch.full((rows, 20), 11), mask_id=11, steps=5, noise=noise(rows, first=first, seed=seed), **keys
        )

    whole = found(3)
    assert torch.equal(whole, torch.cat([found(1), found(2, first=1)]))
    assert not torch.equal(whole, found(3, seed=1))
    critic = lambda tokens, step: tokens.float() / 11  # noqa: E731
    assert torch.equal(found(3, critic=critic), torch.cat([found(2, critic=critic), found(1, first=2, critic=critic)]))


def test_noise_on_confidence_and_on_critic_scores_changes_the_order():
    def order(**keys):
        oracle = Oracle(truth(), 11, sharpness=3.0)
        sample_tokens(oracle, torch.full((3, 20), 11), mask_id=11, steps=6, noise=noise(3), **keys)
        return oracle.seen[1] == 11

    assert not torch.equal(order(confidence_noise=0.0), order(confidence_noise=20.0))
    critic = lambda tokens, step: tokens.float() / 11  # noqa: E731
    assert not torch.equal(order(critic=critic, critic_noise=0.0), order(critic=critic, critic_noise=20.0))


def test_the_surest_tokens_are_kept_first():
    sure = torch.arange(20).expand(3, 20).float()  # later places are surer
    logits = torch.nn.functional.one_hot(truth(), 11).float() * (1 + 0.3 * sure[..., None])
    seen = []

    def denoise(tokens, places, step):
        seen.append(tokens)
        return logits.gather(1, places[..., None].expand(-1, -1, 11))

    sample_tokens(
        denoise, torch.full((3, 20), 11), mask_id=11, steps=4, noise=noise(3), temperature=0.0, confidence_noise=0.0
    )
    left = masked_counts(20, 4)[1]
    assert (seen[1][:, :left] == 11).all()
    assert (seen[1][:, left:] != 11).all()


# padding


def padded(rows: int, tokens: int) -> torch.Tensor:
    """The first 1 … tokens places are real."""
    return torch.arange(tokens) < (1 + torch.arange(rows) % tokens)[:, None]


def test_a_share_of_the_real_tokens_is_hidden_and_padding_never():
    keep = padded(24, 12)
    for step in range(30):
        masked = mask_tokens(noise(24, step), 12, keep)
        assert not (masked.mask & ~keep).any()
        expected = (draw_mask_ratios(noise(24, step)) * keep.sum(1)).ceil().clamp(min=1)
        assert torch.equal(masked.mask.sum(1).float(), expected)
        kept = masked.rows[masked.weights > 0]
        assert torch.equal(kept.sort().values, masked.mask.flatten().nonzero()[:, 0])
        assert masked.rows.shape == (max_masked_rows(24, 12),)


def test_what_is_hidden_does_not_depend_on_padding():
    keep = padded(6, 20)
    together = mask_tokens(noise(6, 4), 20, keep).mask
    for row in range(6):
        length = int(keep[row].sum())
        assert torch.equal(together[row, :length], mask_tokens(noise(1, 4, first=row), length).mask[0])


def test_nothing_padded_is_no_mask():
    a, b = mask_tokens(noise(5, 1), 9), mask_tokens(noise(5, 1), 9, torch.ones(5, 9, dtype=torch.bool))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# critics


def test_redrawn_tokens_lie_at_scored_places_and_follow_the_logits():
    tokens = truth(4, 16, 11)
    masked = mask_tokens(noise(4), 16)
    hidden = torch.randn(len(masked.rows), 11, generator=torch.Generator().manual_seed(0))

    def drawn(temperature, parts):
        return resample_masked(lambda rows: 9 * rows, parts, hidden, masked, tokens, noise(4), temperature)

    whole = [slice(0, len(hidden))]
    filled, wrong = drawn(0.0, whole)
    assert torch.equal(filled[~masked.mask], tokens[~masked.mask])
    scored = masked.weights > 0
    assert torch.equal(filled.flatten()[masked.rows][scored], hidden.argmax(1)[scored])
    assert torch.equal(wrong, filled.flatten()[masked.rows] != tokens.flatten()[masked.rows])
    assert not wrong[~scored].any()
    halves = [slice(0, 20), slice(20, len(hidden))]
    assert torch.equal(drawn(1.0, whole)[0], drawn(1.0, halves)[0])


def test_judging_counts_scored_places_alone():
    masked = mask_tokens(noise(4, 3), 16)
    wrong = torch.arange(len(masked.rows)) % 3 == 0
    wrong &= masked.weights > 0
    scores = torch.full((4, 16, 1), -9.0)
    scores.view(-1)[masked.rows[wrong]] = 9.0  # always right
    found = score_critic(scores, masked, wrong)
    assert float(found.count) == int(masked.mask.sum()) == float(found.right)
    assert float(found.wrong) == int(wrong.sum())
    assert float(found.loss().total.value()) == pytest.approx(math.log1p(math.exp(-9)), rel=1e-2)
    opposite = score_critic(-scores, masked, wrong)
    assert float(opposite.right) == 0
    assert float(opposite.loss().total.value()) == pytest.approx(9, rel=1e-3)
    unscored = ~masked.mask
    assert torch.equal(score_critic(torch.where(unscored[..., None], 5.0, scores), masked, wrong).sum, found.sum)


def test_critic_noise_may_stay():
    critic = lambda tokens, step: torch.zeros(tokens.shape)  # noqa: E731 (noise alone decides)

    def orders(critic_noise=1.2e3, **keys):
        oracle = Oracle(truth(), 11)
        sample_tokens(
            oracle,
            torch.full((3, 20), 11),
            mask_id=11,
            steps=6,
            noise=noise(3),
            critic=lambda t, s: critic(t, s) + 1e3 * (torch.arange(20) < 4),
            critic_noise=critic_noise,
            **keys,
        )
        return oracle.seen

    falling, constant = orders(), orders(critic_noise_schedule="constant")
    assert not torch.equal(falling[-1], constant[-1])
    left = masked_counts(20, 6)[5]
    assert ((falling[-1] == 11).sum(1) == left).all()
    assert (falling[-1] == 11)[:, 4:].sum() < (constant[-1] == 11)[:, 4:].sum()  # late noise still moves what is hidden
    # At a strength of 6,000 the last of five draws has 1,000 if it falls, which moves no token past a score of 1,000, and 5,000 if it rises.
    falling, rising = (orders(6e3, critic_noise_schedule=kind) for kind in ("falling", "rising"))
    assert (falling[-1] == 11)[:, 4:].sum() < (rising[-1] == 11)[:, 4:].sum()


def test_guided_hidden_states_are_guided_logits():
    """The head is linear, so the tokens are those of guided logits; conditions stand in a batch of twice the rows."""
    weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    table = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(1))  # wanted, other
    start = torch.full((3, 20), 11)

    def hidden(tokens, step):
        assert tokens.shape == (6, 20)
        return table.repeat_interleave(3, dim=0)

    def logits(rows):
        return rows @ weight.T

    def denoise(tokens, places, step):
        wanted, other = logits(table)
        found = (other + 4.0 * (wanted - other)).expand(3, -1, -1)
        return found.gather(1, places[..., None].expand(-1, -1, 11))

    options = MaskedSample(steps=5, guidance=4.0, noise=2.0)
    a = sample_tokens_guided(hidden, logits, start, options, guide=True, mask_id=11, noise=noise(3))
    b = sample_tokens(denoise, start, mask_id=11, steps=5, noise=noise(3), confidence_noise=2.0)
    assert torch.equal(a, b)
