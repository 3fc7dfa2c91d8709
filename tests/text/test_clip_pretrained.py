"""The adapter against transformers' own features, with random weights saved into a folder and loaded back."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from kineograph.core.batch import Batch, Shape
from kineograph.core.errors import InputError
from kineograph.core.task import BuildContext, task_state_dict
from kineograph.text.clip_embedding import ClipEmbedder, ClipSource
from kineograph.text.clip_pretrained import Preprocessing, PretrainedClip
from tests.text.waiting import NoWaiting

CAPTIONS = ["a red 3", "a blue cat moves left up", "7"]
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "</s>", "<unk>", "<s>", *["a", "red", "blue", "green", "3", "7", "cat", "moves", "left", "up"]]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)])
    path = tmp_path_factory.mktemp("clip")
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(path)
    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = {
        **shape,
        "vocab_size": 16,
        "max_position_embeddings": 10,
        "eos_token_id": 1,
        "bos_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {**shape, "hidden_size": 36, "image_size": 16, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 16}, "resample": 3,
            "do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "do_normalize": True, "image_mean": MEAN, "image_std": STD,
        })
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoTokenizer, CLIPModel

    return CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def adapter(folder, notes=None, length=None) -> PretrainedClip:
    return PretrainedClip(str(folder), length, (notes if notes is not None else []).append)


def photo(height: int, width: int) -> np.ndarray:
    """H W C uint8, smooth in places and sharp in others."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 120 * np.sin(x / (3 + k) + k) * np.cos(y / (5 - k)) for k in range(3)]
    picture = np.stack(waves, -1).astype(np.uint8)
    picture[height // 3 : height // 2, width // 4 : width // 2] = (255, 0, 40)
    return picture


def test_texts_as_transformers_embeds_them(folder, reference):
    model, tokenizer = reference
    clip = adapter(folder)
    assert (clip.width, clip.text_width, clip.length) == (20, 24, 10)
    embed, encodings, mask = clip.embed_texts(CAPTIONS)
    assert mask.sum(1).tolist() == [5, 8, 3]
    with torch.no_grad():
        for row, caption in enumerate(CAPTIONS):
            found = model.get_text_features(**tokenizer([caption], return_tensors="pt"))
            torch.testing.assert_close(embed[row], F.normalize(found.pooler_output, dim=-1)[0], rtol=1e-4, atol=1e-5)
            count = int(mask[row].sum())
            torch.testing.assert_close(encodings[row, :count], found.last_hidden_state[0], rtol=1e-4, atol=1e-5)
            assert not encodings[row, count:].any()


@pytest.mark.parametrize("size", [(16, 16), (64, 64), (40, 61), (75, 33), (11, 9)])
def test_images_as_transformers_embeds_them(folder, reference, size):
    """Resized (antialiased), cropped and normalised as its own processor does with Pillow."""
    processing = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    model, _ = reference
    processor = processing.CLIPImageProcessorPil.from_pretrained(folder)
    picture = photo(*size)
    with torch.no_grad():
        shown = processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"]
        wanted = F.normalize(model.get_image_features(shown).pooler_output, dim=-1)
    clip = adapter(folder)
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None] / 255
    found = clip.embed_images(pixels)
    ours = clip._parts["preprocess"](pixels)
    assert ours.shape == shown.shape
    # Pillow rounds to 1/255 twice, of values divided by 0.2; and at sharp edges it matters which axis it takes first, which versions differ in.
    assert (ours - shown).abs().quantile(0.95) < 0.03
    assert (ours - shown).abs().max() < 0.15
    torch.testing.assert_close(found, wanted, atol=1e-4 if size == (16, 16) else 1e-2, rtol=0)


def test_clips_grey_pictures_and_types(folder):
    clip = adapter(folder)
    pixels = torch.rand(2, 3, 3, 16, 16)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = clip.embed_images(pixels, mask)
    torch.testing.assert_close(found[1], clip.embed_images(pixels[1:, 0])[0])
    first, second = clip.embed_images(pixels[0, :2])
    torch.testing.assert_close(found[0], F.normalize(first + second, dim=0))
    grey = torch.rand(1, 1, 16, 16)
    torch.testing.assert_close(clip.embed_images(grey), clip.embed_images(grey.expand(1, 3, 16, 16)))


def test_it_is_loaded_late_frozen_and_not_saved(folder):
    clip = adapter(folder)
    assert not clip.loaded
    clip.embed_texts(["a red 3"])
    assert clip.loaded
    assert not list(clip.parameters())
    assert task_state_dict(clip) == {}
    clip.train()
    assert not clip._parts["model"].training
    assert not clip.embed_texts(["a"])[0].requires_grad


def test_with_embeddings_in_the_data_nothing_is_loaded(folder):
    context = BuildContext(shape=Shape(1, 16, 16, 3, 8.0))
    stages = {}
    reader = ClipEmbedder(ClipSource(name=str(folder)), context, stages)
    assert reader.width == 20
    assert stages == {}
    batch = Batch(
        torch.arange(2), text_embeds=torch.randn(2, 10, 24), extra={"image_embed": torch.randn(2, 20), "text_embed": torch.randn(2, 20)}
    )  # fmt: skip
    for vectors in (reader.images(batch), reader.texts(batch).embed):
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))
    assert not reader.adapter.loaded
    without = Batch(torch.arange(2), captions=CAPTIONS[:2], extra={"text_embed": torch.randn(2, 20)})
    reader.texts(without, encodings=False)
    assert not reader.adapter.loaded
    assert reader.texts(without).encodings.shape == (2, 10, 24)  # there is no other way to have them
    assert reader.adapter.loaded


def test_long_captions_are_cut_and_it_is_said_once(folder):
    notes = []
    clip = adapter(folder, notes, length=4)
    _, encodings, mask = clip.embed_texts(["a red 3 moves left", "a blue 7 moves up", "7"])
    assert encodings.shape == (3, 4, 24)
    assert mask.sum(1).tolist() == [4, 4, 3]
    assert len(notes) == 1
    assert "clip.length=4" in notes[0]


def test_what_is_wrong_is_said(folder, tmp_path):
    with pytest.raises(InputError, match=r"clip\.name=.*nowhere does not exist"):
        adapter(tmp_path / "nowhere")
    with pytest.raises(InputError, match="at most 10"):
        adapter(folder, length=11)
    with pytest.raises(InputError, match=r"clip\.name=nobody/nothing cannot be loaded"):
        adapter("nobody/nothing")
    with pytest.raises(InputError, match="resample=1"):
        Preprocessing({"resample": 1}, 16)
    notes = []
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "preprocessor_config.json").unlink()
    adapter(bare, notes).embed_images(torch.rand(1, 3, 16, 16))
    assert "preprocessor_config.json" in notes[0]


def test_sizes_in_other_words():
    assert Preprocessing({"size": 20}, 16).target_size(40, 80) == (20, 40)
    assert Preprocessing({"size": {"height": 16, "width": 16}}, 16).target_size(40, 80) == (16, 16)
    assert Preprocessing({"do_center_crop": False}, 16).target_size(40, 80) == (16, 16)
    assert Preprocessing({"size": {"shortest_edge": 20}}, 16)(torch.rand(1, 3, 40, 80)).shape == (1, 3, 16, 16)


def test_a_step_never_waits_for_the_device(folder):
    clip = adapter(folder)
    pictures = torch.rand(2, 3, 20, 16)
    clip.embed_images(pictures), clip.embed_texts(CAPTIONS)  # loads it
    made = []
    with NoWaiting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_tensor", lambda *values: made.append(values))  # a copy from the host each time
        clip.embed_images(pictures)
        clip.embed_texts(CAPTIONS)
    assert made == []


@pytest.mark.gpu
def test_a_step_on_the_gpu_never_waits(folder):
    clip = adapter(folder).cuda()
    pictures = torch.rand(2, 3, 20, 16, device="cuda")
    clip.embed_images(pictures), clip.embed_texts(CAPTIONS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip.embed_images(pictures)
        clip.embed_texts(CAPTIONS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
