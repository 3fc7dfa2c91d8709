"""Every preset builds at its full size on the meta device, and takes two real steps in a shrunk form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from kineograph.codec.causal_vae import CausalVAE, CausalVAEConfig
from kineograph.codec.causal_vae_weights import config_to_diffusers, weights_to_diffusers
from kineograph.codec.perceptual import Lpips
from kineograph.core import weight_cache
from kineograph.core.batch import Shape
from kineograph.core.capabilities import SupportsReconstruction
from kineograph.core.config import parse
from kineograph.core.errors import InputError
from kineograph.core.task import BuildContext, Task, player_parameters
from kineograph.data.media_config import MediaConfig
from kineograph.doctor import estimate
from kineograph.family.cogvideox.diffusers_weights import diffusers_config, network_state
from kineograph.family.cogvideox.network import Transformer
from kineograph.family.cogvideox.transformer_config import RELEASED, TransformerShape
from kineograph.run import layers
from kineograph.run.dry_run import estimate_plan
from kineograph.run.plan import make_plan
from kineograph.run.train import train
from kineograph.train import checkpoint

QUICK = [
    "train.steps=2", "train.batch_size=2", "train.log_every=1", "train.validation_samples=2", "train.samples=2", "train.save_every=2",
    "train.validate_every=2", "train.sample_every=2", "train.workers=0", "train.device=cpu", "train.trackers=[]", "train.warmup=1",
    "train.evaluation_samples=2",
]  # fmt: skip

TINY_TRANSFORMER = {"depth": 1, "heads": 2, "head_width": 16, "time_width": 16, "base_frames": 3}

# Released shapes: each keeps its kind of positions and conditions.
RELEASED_TINY = [
    "data.size=32", "data.frames=9", "stages.transformer.text.length=6", "stages.transformer.text.width=24", "stages.transformer.sample.steps=2",
    "stages.transformer.lora.rank=2", "train.compile=false", "train.format=gif",
    *(f"stages.transformer.{key}={value}" for key, value in {**TINY_TRANSFORMER, "base_size": [4, 4]}.items()),
]  # fmt: skip

# What makes larger presets small without changing which parts they have.
SHRINK: dict[str, list[str]] = {
    "dalle2-tiny": [
        "data.count=40", "stages.clip.depth=1", "stages.prior.depth=1", "stages.prior.sample.steps=2", "stages.decoder.width=8",
        "stages.decoder.sample.steps=2", "stages.upsampler.width=8", "stages.upsampler.sample.steps=2",
    ],
    "dalle2-digits": [
        "data.size=32", "stages.clip.data.size=16", "stages.prior.data.size=16", "stages.clip.width=16", "stages.clip.depth=1",
        "stages.prior.width=24", "stages.prior.depth=1",
        "stages.prior.sample.steps=2", "stages.decoder.width=8", "stages.decoder.data.size=16", "stages.decoder.sample.steps=2",
        "stages.upsampler.low_res_size=16", "stages.upsampler.width=8", "stages.upsampler.sample.steps=2",
    ],
    "dalle2-decoder-64": [
        "train.accumulate=1", "data.size=32", "stages.decoder.size=16", "stages.decoder.width=8", "stages.decoder.sample.steps=2",
    ],
    "dalle2-64-256-1024": [
        "train.accumulate=1", "data.size=32", "stages.prior.width=64", "stages.prior.depth=1",
        "stages.prior.sample.steps=2", "stages.decoder_64.size=16", "stages.decoder_64.width=8", "stages.decoder_64.sample.steps=2",
        "stages.decoder_256.data.size=32",
        "stages.decoder_256.low_res_size=16", "stages.decoder_256.width=8", "stages.decoder_256.crop=16", "stages.decoder_256.sample.steps=2",
        "stages.decoder_1024.data.size=64", "stages.decoder_1024.low_res_size=32", "stages.decoder_1024.width=8",
        "stages.decoder_1024.crop=64", "stages.decoder_1024.sample.steps=2", "stages.decoder_256.train.grids=[]", "stages.decoder_1024.train.grids=[]",
    ],
    "dalle2-latent": [
        "data.size=32", "stages.tokenizer.width=8", "stages.decoder.width=8", "stages.decoder.sample.steps=2",
    ],
    "dalle2-unconditional": [
        "data.size=16", "stages.decoder.width=8", "stages.decoder.sample.steps=2", "stages.upsampler.data.size=32",
        "stages.upsampler.low_res_size=16", "stages.upsampler.crop=16", "stages.upsampler.width=8", "stages.upsampler.sample.steps=2",
    ],
    "vqgan-tiny": ["stages.tokenizer.width=8"],
    "cvivit-clips": [
        "data.size=32", "data.frames=3", "data.split_by=file", "stages.tokenizer.width=32", "stages.tokenizer.spatial_depth=1",
        "stages.tokenizer.temporal_depth=1", "stages.tokenizer.adversarial.start=0", "stages.tokenizer.adversarial.width=8",
    ],
    "vqgan-photos": ["data.size=32", "data.split_by=file", "stages.tokenizer.width=8", "stages.tokenizer.adversarial.start=0"],
    "photos-tiny": ["data.size=16", "stages.tokenizer.width=8", "stages.generator.depth=1"],
    "photos": ["data.size=16", "stages.tokenizer.width=8", "stages.generator.width=48", "stages.generator.depth=1"],
    "clips-tiny": [
        "data.size=16", "data.frames=5", "stages.tokenizer.data.frames=1", "stages.tokenizer.width=8", "stages.generator.depth=1",
    ],
    "clips": [
        "data.size=16", "data.frames=5", "stages.tokenizer.width=16", "stages.tokenizer.spatial_depth=1",
        "stages.tokenizer.temporal_depth=1", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "muse-tiny": ["data.count=40", "stages.tokenizer.width=8", "stages.generator.depth=1"],
    "muse-digits": ["stages.tokenizer.width=8", "stages.generator.width=48", "stages.generator.depth=1"],
    "muse-base": [
        "train.accumulate=1", "data.size=32", "stages.tokenizer.width=8", "stages.tokenizer_512.width=8", "stages.tokenizer_512.data.size=64",
        "stages.superres.data.size=64", "stages.generator.width=32", "stages.generator.depth=1", "stages.generator.heads=2",
        "stages.superres.width=32", "stages.superres.depth=1", "stages.superres.heads=2", "stages.generator.sample.steps=2",
        "stages.superres.sample.steps=2", "stages.tokenizer.adversarial.start=0", "stages.tokenizer_512.adversarial.start=0",
    ],
    "phenaki-tiny": ["data.count=40", "stages.tokenizer.width=16", "stages.generator.depth=1"],
    "phenaki-digits": [
        "data.size=32", "data.frames=5", "stages.tokenizer.width=16", "stages.tokenizer.spatial_depth=1",
        "stages.tokenizer.temporal_depth=1", "stages.images.width=48", "stages.images.depth=1", "stages.images.sample.steps=2",
        "stages.images.data.frames=1", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "phenaki-image-then-video": [
        "data.size=32", "data.frames=5", "stages.tokenizer.width=16", "stages.tokenizer.spatial_depth=1",
        "stages.tokenizer.temporal_depth=1", "stages.images.width=48", "stages.images.depth=1", "stages.images.sample.steps=2",
        "stages.images.data.frames=1", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "phenaki-base": [
        "train.accumulate=1", "data.size=32", "data.frames=5", "stages.tokenizer.width=32", "stages.tokenizer.heads=2", "stages.tokenizer.spatial_depth=1",
        "stages.tokenizer.temporal_depth=1", "stages.tokenizer.adversarial.start=0", "stages.tokenizer.adversarial.width=8",
        "stages.generator.width=32", "stages.generator.depth=1", "stages.generator.heads=2", "stages.critic.width=32",
        "stages.critic.depth=1", "stages.critic.heads=2", "stages.critic.sample.steps=2",
    ],
    "nuwa-tiny": ["data.count=40", "stages.tokenizer.width=8", "stages.generator.depth=1"],
    "nuwa-sketch-tiny": [
        "data.count=40", "stages.tokenizer.width=8", "stages.sketch_tokenizer.width=8", "stages.generator.depth=1",
    ],
    "nuwa-sound-tiny": [
        "data.count=40", "stages.tokenizer.width=8", "stages.sound_tokenizer.width=8", "stages.generator.depth=1",
    ],
    "nuwa-sound-digits": [
        "data.frames=3", "stages.tokenizer.width=8", "stages.sound_tokenizer.width=8", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "nuwa-digits": [
        "data.size=32", "data.frames=3", "stages.tokenizer.width=8", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "nuwa-base": [
        "data.size=32", "data.frames=2", "stages.tokenizer.width=8", "stages.tokenizer.adversarial.start=0", "stages.generator.width=32",
        "stages.generator.depth=3", "stages.generator.heads=2", "stages.generator.text.width=32", "stages.generator.text.depth=1",
        "stages.generator.text.heads=2",
    ],
    "nuwa-mnist": [
        "data.size=32", "data.frames=3", "stages.tokenizer.width=8", "stages.generator.width=48", "stages.generator.depth=1",
    ],
    "cogvideox-tiny": ["data.count=40", "data.frames=5", "stages.generator.depth=1", "stages.generator.sample.steps=2"],
    "cogvideox-digits": [
        "data.size=16", "data.frames=5", "data.count=40", "stages.vae.widths=[8, 8, 8]", "stages.generator.depth=1", "stages.generator.heads=1",
        "stages.generator.sample.steps=2",
    ],
    **{f"cogvideox-{shape}": RELEASED_TINY for shape in RELEASED},
}  # fmt: skip


@pytest.fixture(scope="module")
def lpips_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds random weights as lpips-vgg16."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KINEO_CACHE", str(folder))
        weight_cache.store("lpips-vgg16", Lpips("vgg16").state_dict())
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 of random weights with a vocabulary of six words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("t5")
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", "a", "picture", "of"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    T5EncoderModel(T5Config(vocab_size=8, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of random weights with the same words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clip")
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", "a", "picture", "of"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 3}
    text = {**shape, "vocab_size": 8, "max_position_embeddings": 10, "eos_token_id": 1, "pad_token_id": 0}
    vision = {**shape, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)).save_pretrained(folder)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    switches = dict.fromkeys(("do_resize", "do_center_crop", "do_normalize"), True)
    (folder / "preprocessor_config.json").write_text(json.dumps({**switches, **size, **colours, "resample": 3}))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(random.integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a picture of {number}")
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    random = np.random.default_rng(0)
    for number in range(6):
        frames = [Image.fromarray(random.integers(0, 256, (32, 36, 3), dtype=np.uint8)) for _ in range(20)]
        frames[0].save(folder / f"{number}.gif", save_all=True, append_images=frames[1:], duration=60, loop=0)
        (folder / f"{number}.txt").write_text(f"a picture of {number}")
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, t5: Path) -> Callable[[str], Path]:
    """A folder of diffusers' form with random weights, of a released shape's kind."""

    def make(shape: str) -> Path:
        folder = tmp_path_factory.mktemp(f"released-{shape}")
        keys = {k: v for k, v in RELEASED[shape].items() if k in TransformerShape.model_fields}
        network = Transformer(
            parse(TransformerShape, {**keys, **TINY_TRANSFORMER, "base_size": (4, 4)}), 4, 24, 6, base=(3, 4, 4)
        )
        vae = CausalVAE(
            CausalVAEConfig(widths=(8, 8, 8, 8), layers=1, latent_channels=4, groups=4, scale=0.7),
            Shape(9, 32, 32, 3, 8),
        )
        for name, config, state in (
            ("transformer", diffusers_config(network, 24, 6), network_state(network)),
            (
                "vae",
                {**config_to_diffusers(vae), "invert_scale_latents": shape == "1.5-5b-i2v"},
                weights_to_diffusers(vae),
            ),
        ):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
            whole = {key: value.contiguous() for key, value in state.items()}
            save_file(whole, folder / name / "diffusion_pytorch_model.safetensors")
        shutil.copytree(t5, folder / "text_encoder")
        return folder

    return make


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames first, as the standard Moving-MNIST file has them."""
    path = tmp_path_factory.mktemp("arrays") / "mnist_test_seq.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (20, 200, 64, 64), dtype=np.uint8))
    return path


def files(preset: str, clip: Path, pictures: Path, arrays: Path) -> list[str]:
    """Where the data of presets that need some lie, and the CLIP that is not trained."""
    tree = layers.read_config([preset])
    places = (("folder", pictures), ("memmap", arrays))
    found = [f"data.folder={place}" for name, place in places if name == tree["data"]["source"]]
    named = [name for name, stage in tree["stages"].items() if isinstance(stage.get("clip"), dict)]
    return found + [f"stages.{name}.clip.name={clip}" for name in named]


def settings(
    preset: str, t5: Path, clip: Path, pictures: Path, clips: Path, arrays: Path, released: Callable[[str], Path]
) -> list[str]:
    """What a user of the preset must name."""
    tree = layers.read_config([preset])
    found = files(preset, clip, clips if preset.startswith(("cogvideox", "cvivit", "clips")) else pictures, arrays)
    for name, stage in tree["stages"].items():
        if stage.get("weights"):
            found.append(f"stages.{name}.weights={released(stage['shape'])}")
        elif stage.get("text", {}).get("kind") == "t5":
            found += [f"stages.{name}.text.name={t5}", f"stages.{name}.text.width=24"]
    return found


def test_presets_that_are_shrunk_exist() -> None:
    assert set(SHRINK) <= set(layers.preset_names())


@pytest.mark.parametrize("preset", layers.preset_names())
def test_builds_on_the_meta_device(preset: str, clip: Path, pictures: Path, arrays: Path) -> None:
    tree = layers.read_config([preset, *files(preset, clip, pictures, arrays)])
    built: dict[str, Task] = {}
    with torch.device("meta"):
        for stage in make_plan(tree).stages:
            context = BuildContext(
                stage.spec.data.shape, stage=built.__getitem__, captions=lambda: ["a red 3"], note=lambda line: None
            )
            task = built[stage.name] = stage.spec.task.build(stage.spec.config, context)
            for player in task.players:
                assert player_parameters(task, player)
            assert all(p.is_meta for p in task.parameters())


@pytest.mark.parametrize("preset", layers.preset_names())
def test_no_stage_that_reads_captions_mirrors_its_pictures(
    preset: str, clip: Path, pictures: Path, arrays: Path
) -> None:
    for stage in make_plan(layers.read_config([preset, *files(preset, clip, pictures, arrays)])).stages:
        if "captions" in stage.spec.config.reads() and isinstance(stage.spec.data, MediaConfig):
            assert stage.spec.data.flip == 0, stage.name


@pytest.mark.parametrize("preset", [name for name in layers.preset_names() if name.startswith("dalle2")])
def test_a_decoder_learns_from_embeddings_like_those_its_prior_draws(
    preset: str, clip: Path, pictures: Path, arrays: Path
) -> None:
    """A CLIP embeds an enlarged small picture otherwise than a large one: prior and decoder must show it the same size."""
    stages = {
        stage.name: stage
        for stage in make_plan(layers.read_config([preset, *files(preset, clip, pictures, arrays)])).stages
    }
    for stage in stages.values():
        for key in ("prior", "clip"):
            below = getattr(stage.spec.config, key, None)
            if isinstance(below, str):
                assert stages[below].spec.data.size == stage.spec.data.size, (stage.name, key)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the steps, and tests of their own."""
    monkeypatch.setattr("kineograph.run.previews.draw_curves", lambda *files: None)


@pytest.mark.parametrize("preset", layers.preset_names())
@pytest.mark.usefixtures("no_curves")
def test_takes_two_steps_when_shrunk(
    preset: str,
    t5: Path,
    clip: Path,
    pictures: Path,
    clips: Path,
    arrays: Path,
    released: Callable[[str], Path],
    lpips_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KINEO_CACHE", str(lpips_cache))
    words = [preset, *QUICK, *settings(preset, t5, clip, pictures, clips, arrays, released), *SHRINK.get(preset, [])]
    run = train(words, run=tmp_path / "run", quiet=True)
    plan = make_plan(layers.read_config(words))
    for stage in plan.stages:
        assert checkpoint.saved_steps(run / stage.name / "checkpoints")[-1] == 2
    first = plan.stages[0]
    if issubclass(first.spec.task, SupportsReconstruction):
        assert list((run / first.name / "validation").iterdir())
    if len(plan.stages) > 1:
        assert list((run / plan.stages[-1].name / "samples").glob("step-00000002/grid.png"))


@pytest.mark.parametrize("preset", [name for name in layers.preset_names() if not name.endswith("-tiny")])
def test_no_tokenizer_has_settings_with_which_one_large_gradient_loses_its_codes(
    preset: str, clip: Path, pictures: Path, arrays: Path
) -> None:
    """docs/log.md has the spikes. The tiny presets have figures with theirs."""
    for stage in make_plan(layers.read_config([preset, *files(preset, clip, pictures, arrays)])).stages:
        if stage.spec.config.task in ("vqgan", "cvivit"):
            player = stage.players["generator"]
            assert player.betas[1] <= 0.95, stage.name
            assert preset == "vqgan-photos" or (player.clip or 1) < 1, stage.name  # vqgan-photos has figures too


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["muse-base", "nuwa-base", "phenaki-base"])
def test_presets_for_one_gpu_with_80_gb_fit_there(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_memory_settings", lambda *_: {})  # what would take less is not asked here
    found = list(estimate_plan([preset], 80 * 10**9, lambda _: None))
    assert found
    for stage in found:
        assert stage.fits, (stage.stage.name, stage.memory.total / 2**30)


GANS = ("cvivit-clips", "muse-base", "nuwa-base", "phenaki-base", "vqgan-photos")


@pytest.mark.parametrize("preset", GANS)
def test_a_gan_without_its_perceptual_weights_is_refused_before_anything_is_written(
    preset: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        InputError, match=r"stages.tokenizer.perceptual.weights=lpips-vgg16: .* run kineo weights get lpips-vgg16"
    ):
        train([preset, f"data.folder={pictures}", "data.split_by=file"], run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_presets_train_no_gan_without_a_perceptual_loss() -> None:
    for preset in layers.preset_names():
        for stage in layers.read_config([preset])["stages"].values():
            if stage.get("adversarial"):
                assert preset in GANS and stage["perceptual"]["weights"] == "lpips-vgg16", preset
