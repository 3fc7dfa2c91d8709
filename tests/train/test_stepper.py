"""One optimizer step: accumulation, players, precision, checkpointing, judging, and state that goes on."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kineograph.core.batch import Batch, Sample
from kineograph.core.errors import ConfigError
from kineograph.core.noise import Noise
from kineograph.core.task import Loss, Mean, Task
from kineograph.train import checkpoint
from kineograph.train.activation_checkpointing import checkpoint_activations
from kineograph.train.config import EmaConfig, PlayerConfig, TrainConfig
from kineograph.train.optim import LossScale
from kineograph.train.precision import resolve_precision, warn_of_bf16_weights
from kineograph.train.stepper import Stepper
from tests.train.gathered import gather_state
from tests.train.toy_tasks import Duel, Toy, ToyConfig

INPUTS = 12
CONFIG = TrainConfig(lr=1e-2, batch_size=8, steps=20, warmup=0, ema=EmaConfig(decay=0.5))


def batch(step: int = 0, slots: range = range(8), captions: bool = True) -> Batch:
    """Sample `slot` of step `step` is the same in whatever batch it comes."""
    samples = [
        Sample(
            pixels=torch.randint(
                0, 256, (1, 3, 2, 2), generator=torch.Generator().manual_seed(1000 * step + slot), dtype=torch.uint8
            ),
            caption="x" * (slot + 1) if captions else None,
        )
        for slot in slots
    ]
    return Batch.collate(samples, list(slots))


def toy(**keys) -> Toy:
    torch.manual_seed(0)
    return Toy(INPUTS, ToyConfig(task="toy", **keys))


def duel(**keys) -> Duel:
    torch.manual_seed(0)
    return Duel(INPUTS, ToyConfig(task="duel"), **keys)


def weights(task: Task, part: str = "") -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in task.named_parameters() if name.startswith(part)}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_equals_one_big_batch(parts: int) -> None:
    """Although captions of different lengths give the micro-batches different counts."""
    whole, split = Stepper(toy(), CONFIG), Stepper(toy(), CONFIG)
    size = 8 // parts
    for step in range(5):
        one = whole.step(step, [batch(step)])
        two = split.step(step, [batch(step, range(k * size, (k + 1) * size)) for k in range(parts)])
        for name in ("loss", "error", "gradient_norm"):
            assert torch.allclose(one[name], two[name], rtol=1e-5), name
    for a, b in zip(whole.task.parameters(), split.task.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("parts", "most"), [(4, 0.004), (16, 0.006), (64, 0.01)])
def test_gradients_of_bf16_weights_add_up_to_within_a_hundredth(parts: int, most: float) -> None:
    """They are summed in bf16, which costs no memory. One bf16 gradient is about as far from that of fp32."""
    config = CONFIG.model_copy(update={"batch_size": 4 * parts, "precision": "bf16"})
    stepper = Stepper(toy(width=64).to(torch.bfloat16), config)
    batches = [batch(0, range(4 * part, 4 * part + 4)) for part in range(parts)]
    trained = [p for p in stepper.task.parameters() if p.requires_grad]
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for one in batches:
        stepper.accumulate_gradients(0, [one])
        for total, p in zip(exact, trained, strict=True):
            total += p.grad
            p.grad = None
    stepper.accumulate_gradients(0, batches)
    error = sum(float((p.grad - total).square().sum()) for total, p in zip(exact, trained, strict=True))
    assert 0 < (error / sum(float(total.square().sum()) for total in exact)) ** 0.5 < most


def test_what_16_bit_weights_lose_is_said() -> None:
    half = toy().to(torch.bfloat16)

    def warnings(task: Task, optimizer: str, accumulate: int) -> str:
        players = {"model": PlayerConfig(optimizer=optimizer)}
        return "\n".join(warn_of_bf16_weights(task, CONFIG.model_copy(update={"accumulate": accumulate}), players))

    assert "set train.optimizer=adamw_8bit" in warnings(half, "adamw", 64)
    assert "accumulate=128 micro-batches in bf16, which is exact to 1 % up to 64" in warnings(half, "adamw_split", 128)
    assert not warnings(half, "adamw_8bit", 64) and not warnings(toy(), "adamw", 128)


def test_clipping_is_of_the_whole_steps_gradient() -> None:
    """Clipped one by one, two micro-batches whose gradients are of different length would pull alike."""
    config = CONFIG.model_copy(update={"clip": 1e-3, "eps": 1.0})  # a large eps: the length of a gradient counts
    whole, split = Stepper(toy(), config), Stepper(toy(), config)
    before = weights(whole.task)
    for step in range(5):
        one = whole.step(step, [batch(step)])
        split.step(step, [batch(step, range(1)), batch(step, range(1, 8))])
        assert one["gradient_norm"] > 1e-3
    moved = {name: value - before[name] for name, value in weights(whole.task).items()}
    for name, value in weights(split.task).items():
        torch.testing.assert_close(value - before[name], moved[name], rtol=1e-3, atol=1e-9)


def test_the_loss_is_the_mean_and_parity_with_a_plain_loop() -> None:
    stepper = Stepper(toy(), CONFIG)
    plain = toy()
    parameters = [p for p in plain.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=CONFIG.betas, weight_decay=CONFIG.weight_decay, eps=CONFIG.eps)
    for step in range(5):
        values = stepper.step(step, [batch(step)])
        found, wanted, weight = plain(batch(step), Noise.for_rows(0, step, 8))
        loss = ((found - wanted).square() * weight).sum() / weight.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        reference.step()
        reference.zero_grad()
        assert torch.allclose(values["loss"], loss, rtol=1e-5)
    for a, b in zip(stepper.task.parameters(), plain.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


# Players ---------------------------------------------------------------------------------------------------------


def test_players_are_isolated() -> None:
    """With its own rate at 0 a player stands still, whatever the other one does to its gradients."""
    for still, moves in (("generator", "critic"), ("critic", "generator")):
        players = {still: PlayerConfig(lr=0, weight_decay=0), moves: PlayerConfig(lr=1e-2, warmup=0)}
        stepper = Stepper(duel(), CONFIG, players)
        before = weights(stepper.task)
        stepper.step(0, [batch()])
        assert same(
            {name: value for name, value in before.items() if name.startswith(still)}, weights(stepper.task, still)
        )
        assert not any(
            torch.equal(before[name], value) for name, value in weights(stepper.task, moves).items() if "weight" in name
        )


def test_each_player_gets_the_gradient_of_its_own_loss() -> None:
    stepper = Stepper(duel(), CONFIG)
    values = stepper.step(0, [batch()])
    plain = duel()
    for player, prefix in (("generator", ""), ("critic", "critic/")):
        loss = plain.loss(player, plain(batch(), Noise.for_rows(0, 0, 8))).total.value()
        norm = nn.utils.get_total_norm(torch.autograd.grad(loss, list(plain.trainable(player)[0].parameters())))
        assert torch.allclose(values[f"{prefix}loss"], loss, rtol=1e-5)
        assert torch.allclose(values[f"{prefix}gradient_norm"], norm, rtol=1e-5)


def test_a_loss_that_forgets_to_detach_still_cannot_reach_the_other_player() -> None:
    class Leaky(Duel):
        def loss(self, player, shared):
            if player == "generator":
                return super().loss(player, shared)
            return Loss(Mean(self.critic(shared[1]).sum(), float(len(shared[0]))))

    torch.manual_seed(0)
    leaky = Stepper(Leaky(INPUTS, ToyConfig(task="duel")), CONFIG)
    sound = Stepper(duel(), CONFIG)
    leaky.step(0, [batch()])
    sound.step(0, [batch()])
    assert same(weights(leaky.task, "generator"), weights(sound.task, "generator"))


def test_what_one_player_keeps_for_its_backward_pass_is_freed_before_the_next_one_plays() -> None:
    """Held longer, it may be memory of a CUDA graph that the next player's pass replays."""
    kept: list[StorageWeakRef] = []
    alive: list[bool] = []

    class Watched(Duel):
        def loss(self, player, shared):
            if player == "generator":
                alive.extend(not reference.expired() for reference in kept)
                return super().loss(player, shared)
            scores = self.critic(shared[1].detach()).square()
            kept.append(StorageWeakRef(scores.untyped_storage()))
            return Loss(
                Mean(torch.nn.functional.softplus(scores).sum(), float(len(shared[0])))
            )  # softplus keeps its input

    Stepper(Watched(INPUTS, ToyConfig(task="duel")), CONFIG).step(0, [batch()])
    assert alive == [False]


def test_a_player_that_rests_is_untouched() -> None:
    stepper = Stepper(duel(critic_start=2), CONFIG)
    before = weights(stepper.task, "critic")
    for step in range(2):
        values = stepper.step(step, [batch(step)])
        assert "critic/loss" not in values
    assert same(before, weights(stepper.task, "critic"))
    assert not stepper.optimizers["critic"].state()  # not even moments
    assert all(p.grad is None for p in stepper.task.critic.parameters())
    assert "critic/loss" in stepper.step(2, [batch(2)])
    assert not same(before, weights(stepper.task, "critic"))


def test_players_have_their_own_rates_and_averages() -> None:
    players = {
        "generator": PlayerConfig(lr=1.0, warmup=4),
        "critic": PlayerConfig(lr=0.5, warmup=0, ema=EmaConfig(decay=0)),
    }
    stepper = Stepper(duel(), CONFIG, players)
    assert stepper.learning_rates(0) == {"lr": 0.25, "critic/lr": 0.5}
    assert stepper.emas.keys() == {"generator"}


def test_frozen_parts_never_move() -> None:
    stepper = Stepper(toy(), CONFIG)
    before = weights(stepper.task, "helper")
    stepper.step(0, [batch()])
    assert same(before, weights(stepper.task, "helper"))
    assert not any(p.requires_grad for p in stepper.task.helper.parameters())
    stepper.task.train()
    assert not stepper.task.helper.training


# What is not finite ----------------------------------------------------------------------------------------------


class Broken(Toy):
    """The gradient of one step is not a number."""

    broken = False

    def loss(self, player, shared):
        found = super().loss(player, shared)
        return Loss(Mean(found.total.sum * float("nan"), found.total.count)) if self.broken else found


def test_steps_that_are_not_finite_are_skipped_and_counted() -> None:
    torch.manual_seed(0)
    stepper = Stepper(Broken(INPUTS, ToyConfig(task="toy")), CONFIG)
    stepper.step(0, [batch(0)])
    before = weights(stepper.task)
    stepper.task.broken = True
    for step in (1, 2):
        assert torch.isnan(stepper.step(step, [batch(step)])["loss"])
    assert same(before, weights(stepper.task))
    assert (float(stepper.skipped), float(stepper.skipped_in_a_row)) == (2, 2)
    stepper.task.broken = False
    stepper.step(3, [batch(3)])
    assert not same(before, weights(stepper.task))
    assert (float(stepper.skipped), float(stepper.skipped_in_a_row)) == (2, 0)


# Judging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_eval_mode_shows_the_average_and_puts_everything_back(training: bool) -> None:
    stepper = Stepper(toy(dropout=0.5), CONFIG)
    for step in range(4):
        stepper.step(step, [batch(step)])
    stepper.task.train(training)
    before = weights(stepper.task)
    average = {name: value.clone() for name, value in stepper.emas["model"].average.items()}
    with pytest.raises(ZeroDivisionError), stepper.eval_mode() as task:
        assert not task.training
        assert not torch.is_grad_enabled()
        shown = weights(task)
        assert all(torch.equal(shown[name], value) for name, value in average.items())
        raise ZeroDivisionError
    assert stepper.task.training is training
    assert torch.is_grad_enabled()
    assert same(before, weights(stepper.task))
    with stepper.eval_mode(ema=False) as task:
        assert same(before, weights(task))
    assert stepper.task.body[2].training is training  # dropout is on again


def test_judging_changes_no_later_step() -> None:
    one, two = Stepper(toy(dropout=0.5), CONFIG), Stepper(toy(dropout=0.5), CONFIG)
    for step in range(4):
        one.step(step, [batch(step)])
        two.step(step, [batch(step)])
        with two.eval_mode() as task:
            task.validate(batch(99), Noise.for_rows(1, 0, 8))
            torch.rand(3)
    assert same(weights(one.task), weights(two.task))


# Precision, recomputing ------------------------------------------------------------------------------------------


def test_precision() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == "fp32"
    assert resolve_precision("bf16", cpu) == "bf16"
    with pytest.raises(ConfigError, match=r"train\.precision=fp16 needs a GPU"):
        Stepper(toy(), CONFIG.model_copy(update={"precision": "fp16"}))


@pytest.mark.parametrize(("major", "precision"), [(7, "fp32"), (8, "bf16")])
def test_a_gpu_that_only_emulates_bf16_gets_fp32(monkeypatch: pytest.MonkeyPatch, major: int, precision: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert resolve_precision("auto", torch.device("cuda")) == precision


def test_bf16_is_used_where_asked() -> None:
    full, half = (Stepper(toy(), CONFIG.model_copy(update={"precision": p})) for p in ("fp32", "bf16"))
    one, two = full.step(0, [batch()])["loss"], half.step(0, [batch()])["loss"]
    assert one != two
    assert torch.allclose(one, two, rtol=0.05)
    assert all(p.dtype == torch.float32 for p in half.task.parameters())


def test_checkpointing_gives_equal_gradients_with_dropout() -> None:
    plain, saving = (
        Stepper(toy(dropout=0.3), CONFIG),
        Stepper(toy(dropout=0.3), CONFIG.model_copy(update={"checkpointing": True})),
    )
    calls = []
    saving.task.body[0].register_forward_hook(lambda *_: calls.append(1))
    for step in range(3):
        one, two = plain.step(step, [batch(step)]), saving.step(step, [batch(step)])
        assert torch.equal(one["gradient_norm"], two["gradient_norm"])
    assert same(weights(plain.task), weights(saving.task))
    assert len(calls) == 6  # once forward, once again in the backward pass


def test_recomputing_keeps_fewer_activations() -> None:
    def saved(block: nn.Module) -> int:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            block(torch.ones(4, 64, requires_grad=True)).sum().backward()
        return sum(kept)

    block = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    before = saved(block)
    checkpoint_activations(block)
    assert saved(block) < before
    with torch.no_grad():
        assert block(torch.ones(1, 64)).shape == (1, 64)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()[:, None]
        x = nn.functional.scaled_dot_product_attention(x, x, x)[:, 0]
        return self.down(self.up(x.tanh()).tanh()).tanh()


class Calls(TorchDispatchMode):
    """Which operators run, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def attentions(self) -> int:
        return sum("scaled_dot_product" in name and "backward" not in name for name in self.names)


def test_selective_recomputing_runs_attention_once_and_gives_equal_gradients() -> None:
    torch.manual_seed(0)
    plain = Attending()
    blocks = {"none": plain, "all": deepcopy(plain), "light": deepcopy(plain), "selective": deepcopy(plain)}
    checkpoint_activations(blocks["all"])
    for name in ("light", "selective"):
        checkpoint_activations(blocks[name], name)
    x = torch.randn(2, 5, 16)
    found: dict[str, Calls] = {}
    for name, block in blocks.items():
        with Calls() as found[name]:
            block(x).pow(2).sum().backward()
        for own, expected in zip(block.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, expected.grad)
    assert {name: calls.attentions() for name, calls in found.items()} == {
        "none": 1,
        "all": 2,
        "light": 1,
        "selective": 1,
    }
    products = {name: calls.names.count("addmm.default") for name, calls in found.items()}
    assert products == {"none": 3, "all": 6, "light": 4, "selective": 5}  # the way down is kept; the way up is not


# Going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: toy(dropout=0.3), lambda: duel(critic_start=3)])
def test_a_restored_stepper_goes_on_bit_for_bit(make, tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"ema": EmaConfig(decay=0.9, every=2, start=1), "warmup": 6, "schedule": "cosine"}
    )
    straight = Stepper(make(), config, seed=5)
    for step in range(4):
        straight.step(step, [batch(step)])
    checkpoint.save(
        tmp_path,
        4,
        gather_state(straight),
        {"stepper": straight.state(), "best": None, "best_step": None, "elapsed": 0.0},
    )
    torch.manual_seed(123)
    resumed = Stepper(make(), config, seed=5)
    for p in resumed.task.parameters():
        if p.requires_grad:
            p.data.normal_()
    resumed.load(checkpoint.latest(tmp_path))
    for step in range(4, 8):
        torch.rand(step)  # the state of torch's own generator does not matter
        one = straight.step(step, [batch(step)])
        two = resumed.step(step, [batch(step)])
        assert {name: float(value) for name, value in one.items()} == {
            name: float(value) for name, value in two.items()
        }
    for kind, group in gather_state(straight).items():
        assert same(
            {k: v.detach().clone() for k, v in group.items()},
            {k: v.detach().clone() for k, v in gather_state(resumed)[kind].items()},
        )
    assert straight.state() == resumed.state()


def test_what_was_saved_before_the_first_step_is_taken_up(tmp_path: Path) -> None:
    """There are no moments yet, and several processes write no file for nothing."""
    first = Stepper(toy(), TrainConfig(batch_size=8), seed=1)
    tensors = {kind: found for kind, found in gather_state(first).items() if found}
    assert "optimizer" not in tensors
    saved = checkpoint.save(tmp_path, 0, tensors, {"stepper": first.state()})
    again = Stepper(toy(), TrainConfig(batch_size=8), seed=1)
    again.load(saved)
    for stepper in (first, again):
        stepper.step(0, [batch(0)])
    assert same(weights(first.task), weights(again.task))


def test_averages_of_16_bit_weights_are_saved_as_they_are_kept() -> None:
    stepper = Stepper(toy().bfloat16(), TrainConfig(batch_size=8, ema=EmaConfig(decay=0.9)), seed=1)
    for name, average in stepper.emas[stepper.task.players[0]].average.items():
        average.add_(1e-4)
        assert torch.equal(gather_state(stepper)["ema"][name], average)
    assert all(p.dtype == torch.bfloat16 for p in stepper.task.parameters())


def test_tied_weights_are_averaged_under_both_names(tmp_path: Path) -> None:
    class Tied(Toy):
        def __init__(self, inputs, config):
            super().__init__(inputs, config)
            self.body[3].weight = self.body[0].weight

    stepper = Stepper(Tied(INPUTS, ToyConfig(task="toy")), CONFIG)
    for step in range(3):
        stepper.step(step, [batch(step)])
    found = checkpoint.save(tmp_path, 3, gather_state(stepper), {"stepper": stepper.state()})
    ema, online = found.weights(), found.weights(ema=False)
    assert torch.equal(ema["body.0.weight"], ema["body.3.weight"])
    assert not torch.equal(ema["body.0.weight"], online["body.0.weight"])


def test_buffers_are_saved_as_they_are(tmp_path: Path) -> None:
    stepper = Stepper(toy(), CONFIG)
    for step in range(3):
        stepper.step(step, [batch(step)])
    saved = gather_state(stepper)
    assert saved["model"]["seen"] == 3
    assert saved["ema"]["seen"] == 3
    assert saved["ema"].keys() == saved["model"].keys()
    assert not any("helper" in name for name in saved["model"])


def test_the_numbers_of_a_save_are_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loss scale of fp16, which a CPU does not train in, put in place."""
    stepper = Stepper(duel(), CONFIG)
    stepper.step(0, [batch()])
    stepper.scale = LossScale(torch.device("cpu"), start=8.0)
    stepper.skipped, stepper.skipped_in_a_row = torch.tensor(3.0), torch.tensor(2.0)
    as_list, fetched = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.shape) or as_list(tensor))
    with Calls() as calls:
        state = stepper.state()
    assert len(fetched) == 1 and not any("_local_scalar_dense" in name for name in calls.names)
    assert state["scale"] == {"value": 8.0, "good": 0.0}
    assert (state["skipped"], state["skipped_in_a_row"]) == (3.0, 2.0)
    assert state.keys() == {"ema_updates", "scale", "skipped", "skipped_in_a_row"}
