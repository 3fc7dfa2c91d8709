import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from kineograph.core import distributed
from kineograph.core.batch import Batch, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.registry import find_task
from kineograph.core.task import BuildContext, player_parameters
from kineograph.data.order import split_batches
from kineograph.text.clip import ClipConfig, TrainedClip, contrastive_loss

CAPTIONS = ["a red 3", "a blue 7", "two cats", "nothing at all", "a green 1", "up and away"]
SMALL = {
    "task": "clip", "width": 32, "depth": 1, "heads": 2, "embed_width": 16, "patch": 4,
    "text": {"width": 32, "depth": 1, "heads": 2, "length": 12},
}  # fmt: skip


def make(shape=None, **keys) -> TrainedClip:
    torch.manual_seed(0)
    context = BuildContext(shape=shape or Shape(1, 8, 8, 3, 8.0), captions=lambda: CAPTIONS * 2, note=lambda line: None)
    return TrainedClip.build(parse(ClipConfig, {**SMALL, **keys}, "stages.clip"), context)


def pairs(captions=CAPTIONS, frames=1) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (len(captions), frames, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Batch(slots=torch.arange(len(captions)), pixels=pixels, captions=list(captions))


def noise(batch: Batch) -> Noise:
    return Noise(0, 0, batch.slots)


@torch.no_grad()
def judged(task: TrainedClip, batch: Batch) -> dict[str, float]:
    return {name: float(mean.value()) for name, mean in task.eval().validate(batch, noise(batch)).items()}


def units(rows: int, width: int = 8, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_it_is_found_by_its_name():
    assert find_task("clip") is TrainedClip


def test_it_learns_which_picture_belongs_to_which_caption():
    task, batch = make(), pairs()
    optimizer = torch.optim.Adam(player_parameters(task, "model").values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss("model", task(batch, noise(batch))).total.value().backward()
        optimizer.step()
    found = judged(task, batch)
    assert found["loss"] < 0.05
    assert found["retrieval/image_to_text"] == found["retrieval/text_to_image"] == 1
    assert found == judged(task, batch)
    # Pictures that were swapped are found out, so 1 is no constant.
    assert (
        judged(task, Batch(batch.slots, pixels=batch.pixels.roll(1, 0), captions=CAPTIONS))["retrieval/image_to_text"]
        == 0
    )
    images, (texts, _, _) = task.embed_images(batch.video), task.embed_texts(CAPTIONS)
    assert (images @ texts.T).argmax(1).tolist() == list(range(6))


def test_every_weight_but_the_null_text_learns():
    task, batch = make(), pairs()
    task.loss("model", task(batch, noise(batch))).total.value().backward()
    silent = [
        name for name, p in player_parameters(task, "model").items() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert silent == ["text.null.token"]  # no caption is blank


def test_loss_is_the_symmetric_cross_entropy():
    images, texts, scale = units(5), units(5, seed=1), torch.tensor(7.0)
    logits, target = 7 * images @ texts.T, torch.arange(5)
    wanted = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    found = contrastive_loss(images, texts, torch.arange(5), scale)
    torch.testing.assert_close(found.loss / 5, wanted)
    assert int(found.text_hits) == int((logits.argmax(1) == target).sum())
    assert int(found.image_hits) == int((logits.argmax(0) == target).sum())


def test_logits_are_float32_under_autocast():
    images, texts, keys = units(64, 32), units(64, 32, 1), torch.arange(64)
    exact = contrastive_loss(images, texts, keys, torch.tensor(100.0)).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contrastive_loss(images, texts, keys, torch.tensor(100.0)).loss
    torch.testing.assert_close(found, exact)


def test_equal_captions_are_no_negatives():
    """Two pictures of one caption: the loss is as if each were alone in the batch, and its gradient pushes neither away from its caption."""
    images, texts, scale = units(4), units(4, seed=1), torch.tensor(5.0)
    texts[1] = texts[0]
    keys = torch.tensor([9, 9, 2, 3])
    whole = contrastive_loss(images, texts, keys, scale).loss
    parts = [contrastive_loss(images[rows], texts[rows], keys[rows], scale) for rows in ([0, 2, 3], [1, 2, 3])]
    # Rows 2 and 3 see both; so only rows 0 and 1 are compared.
    first, second = (_row_loss(images, texts, [i, 2, 3], scale) for i in (0, 1))
    rest = _row_loss(images, texts, [2, 0, 1, 3], scale) + _row_loss(images, texts, [3, 0, 1, 2], scale)
    torch.testing.assert_close(whole, first + second + rest)
    assert all(part.loss < whole for part in parts)
    alone = contrastive_loss(images, texts, torch.zeros(4, dtype=torch.long), scale)
    assert float(alone.loss) == 0  # one caption for all: nothing to tell apart
    assert int(alone.text_hits) == int(alone.image_hits) == 4


def _row_loss(images, texts, rows, scale):
    """Of the first of these rows, among all of them."""
    ways = (scale * images[rows[0]] @ texts[rows].T, scale * texts[rows[0]] @ images[rows].T)
    return sum(-F.log_softmax(way, 0)[0] for way in ways) / 2


def test_pictures_without_a_caption_are_left_out():
    task, whole = make(), pairs([*CAPTIONS[:4], " ", ""])
    found = task.loss("model", task(whole, noise(whole)))
    found.total.value().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in task.parameters())
    wanted = task.loss("model", task(whole.rows([0, 1, 2, 3]), noise(whole.rows([0, 1, 2, 3]))))
    torch.testing.assert_close(found.total.value(), wanted.total.value())
    assert float(found.total.count) == 4
    for name, mean in wanted.terms.items():
        torch.testing.assert_close(found.terms[name].value(), mean.value())


def test_captions_are_equal_as_the_encoder_reads_them():
    task = make()
    keys = task.keys(["a red 3", " A RED 3 ", "a red 7", "a red 3 " + "and on " * 30, "a red 3 " + "and on " * 40])
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]  # cut at the same place
    # With pictures that all bear the same caption there is nothing to learn: log 6 without the rule.
    batch = pairs(["a red 3"] * 6)
    assert float(task.loss("model", task(batch, noise(batch))).total.value().detach()) == pytest.approx(0, abs=1e-6)


def test_the_temperature_stops_at_its_bound_and_comes_back():
    task = make(temperature=0.02, min_temperature=0.01)
    assert float(task.scale()) == pytest.approx(50, rel=1e-5)
    with torch.no_grad():
        task.sharpness.fill_(9.0)
    assert float(task.scale()) == pytest.approx(100, rel=1e-5)  # judging changes no weight
    judged(task, pairs())
    assert float(task.sharpness) == 9.0
    task.train()
    batch = pairs()
    task.loss("model", task(batch, noise(batch))).total.value().backward()
    assert float(task.sharpness) == pytest.approx(math.log(100))
    assert task.sharpness.grad.abs() > 0  # the gradient still reaches it
    with pytest.raises(ConfigError, match="min_temperature"):
        parse(ClipConfig, {**SMALL, "temperature": 0.005}, "stages.clip")


def test_embeddings_have_length_one_and_their_shapes():
    task = make().eval()
    embed, encodings, mask = task.embed_texts(["a red 3", "", "up"])
    assert (embed.shape, encodings.shape, mask.shape) == ((3, 16), (3, 12, 32), (3, 12))
    assert (task.width, task.text_width, task.length) == (16, 32, 12)
    pictures = pairs().video[:, 0]
    for vectors in (embed, task.embed_images(pictures)):
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(vectors)))
    torch.testing.assert_close(task.embed_images(pictures), task.embed_images(pictures[:, None]))


def test_a_clip_is_the_mean_of_its_real_frames():
    task = make().eval()
    clips = pairs(frames=3).video
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[:, 2] = False
    torch.testing.assert_close(task.embed_images(clips, mask), task.embed_images(clips[:, :2]))
    assert not torch.allclose(task.embed_images(clips), task.embed_images(clips[:, :2]), atol=1e-3)
    still = clips[:, :1].expand(-1, 3, -1, -1, -1)
    torch.testing.assert_close(task.embed_images(still), task.embed_images(clips[:, :1]), rtol=1e-4, atol=1e-5)


def test_pictures_of_other_sizes_are_resized_without_aliasing():
    task = make().eval()
    checks = torch.zeros(1, 3, 32, 32)
    checks[..., ::4, ::4] = 1  # every fourth pixel: what a resize that skips pixels would take for white, or for black
    grey = torch.full((1, 3, 8, 8), 1 / 16)
    assert float(F.cosine_similarity(task.embed_images(checks), task.embed_images(grey))) > 0.999


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="not a multiple of patch=3"):
        make(patch=3)
    with pytest.raises(ConfigError, match=r"text\.kind=none"):
        make(text={"kind": "none"})
    with pytest.raises(InputError, match="1 channels"):
        make().embed_images(torch.zeros(1, 1, 8, 8))


# many processes


def _half(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
    try:
        torch.set_num_threads(1)
        task, batch = make(), pairs(["a red 3", "a blue 7", "a red 3", "two cats"])
        found = task.loss("model", task(batch.rows([2 * rank, 2 * rank + 1]), noise(batch)))
        found.total.sum.backward()
        total = distributed.all_reduce_(found.total.sum.detach().clone())
        gradients = {name: distributed.all_reduce_(p.grad) for name, p in player_parameters(task, "model").items()}
        if rank == 0:
            save_file({"loss": total[None], **gradients}, path)
    finally:
        dist.destroy_process_group()


def _judged_apart(rank: int, world: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    try:
        torch.set_num_threads(1)
        task = make().eval()
        means = {name: torch.zeros(2, dtype=torch.float64) for name in judged(task, pairs())}
        batch = pairs()
        for shares in split_batches(6, 5, world):  # five pairs, then one
            part = replace(batch.rows(shares[rank].indices.tolist()), spare=shares[rank].spare)
            with torch.no_grad():
                found = task.validate(part, noise(part))
            for name, mean in found.items():
                if not part.spare:
                    means[name] += torch.tensor([float(mean.sum), float(mean.count)])
        totals = {name: distributed.all_reduce_(mean) for name, mean in means.items()}
        if rank == 0:
            save_file(totals, path)
    finally:
        dist.destroy_process_group()


def test_validation_does_not_depend_on_the_number_of_processes(tmp_path):
    found = {}
    for world in (1, 2, 3):
        path = str(tmp_path / f"{world}.safetensors")
        mp.start_processes(_judged_apart, (world, path), nprocs=world, start_method="fork")
        found[world] = {name: float(mean[0] / mean[1]) for name, mean in load_file(path).items()}
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    assert found[3] == pytest.approx(found[1], rel=1e-5)
    task, batch = make().eval(), pairs()
    with torch.no_grad():
        alone = task.validate(batch.rows([0, 1]), noise(batch.rows([0, 1])))
    assert float(alone["loss"].value()) != pytest.approx(found[1]["loss"], rel=1e-2)  # other negatives, another loss


def test_two_processes_have_the_gradient_of_one(tmp_path):
    """Equal captions lie on different processes here."""
    path = str(tmp_path / "gradients.safetensors")
    mp.start_processes(_half, (path,), nprocs=2, start_method="fork")
    task, batch = make(), pairs(["a red 3", "a blue 7", "a red 3", "two cats"])
    loss = task.loss("model", task(batch, noise(batch))).total.sum
    loss.backward()
    found = load_file(path)
    torch.testing.assert_close(found.pop("loss")[0], loss.detach(), rtol=1e-5, atol=0)
    for name, p in player_parameters(task, "model").items():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)
