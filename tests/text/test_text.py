import json
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kineograph.core.batch import Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.task import BuildContext, task_state_dict
from kineograph.text import TextConfig, build_text
from kineograph.text.conditioning import encode_captions
from kineograph.text.learned import BOS, EOS, PAD
from tests.text.waiting import NoWaiting

CAPTIONS = ["a red 3 moves left", "a blue 7 moves up", "a red 7 moves left", "the blue 3 goes up"] * 3


def build(captions=CAPTIONS, assets=None, notes=None, **keys):
    torch.manual_seed(0)
    context = BuildContext(
        shape=Shape(1, 16, 16, 3, 8.0),
        captions=lambda: list(captions),
        assets=assets or {},
        note=(notes if notes is not None else []).append,
    )
    return build_text(TextConfig(**keys), context)


SMALL = {"width": 16, "heads": 2, "depth": 1, "length": 12}


# learned


def test_ids_begin_end_and_pad():
    text = build(**SMALL)
    ids = text.vocabulary.ids("a red 3")
    real = [i for i in ids if i != PAD]
    assert len(ids) == 12
    assert real[0] == BOS
    assert real[-1] == EOS
    assert real == list(ids[: len(real)])
    assert BOS not in real[1:]
    assert EOS not in real[:-1]
    assert len({PAD, BOS, EOS}) == 3


def test_bpe_learns_words_and_bytes_do_not():
    words, letters = build(**SMALL), build(**SMALL, tokenizer="byte")
    assert letters.vocabulary.size == 259 < words.vocabulary.size
    assert sum(i != PAD for i in words.vocabulary.ids("a red 3")) == 5  # BOS, three words, EOS
    assert build(**SMALL, vocabulary=265).vocabulary.size == 265


@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
def test_unseen_wordings_and_letters_are_read(tokenizer):
    text = build(**{**SMALL, "length": 40}, tokenizer=tokenizer)
    for caption in ("zebra ünïcode 猫 🙂", "a RED 3 moves left", ""):
        ids = text.vocabulary.ids(caption)
        assert "�" not in text.vocabulary.tokenizer.decode([i for i in ids if i > EOS])
        embeddings, mask = text.encode([caption])
        assert embeddings.shape == (1, 40, 16)
        assert embeddings.isfinite().all()
        assert int(mask.sum()) >= 2
    assert text.vocabulary.ids("a RED 3") == text.vocabulary.ids("a red 3")


def test_truncation_is_said_once_and_keeps_the_end():
    notes = []
    text = build(notes=notes, **SMALL)
    long = "a red 3 moves left and a blue 7 moves up and on and on"
    ids = text.vocabulary.ids(long)
    text.vocabulary.ids(long + " and on")
    assert len(ids) == 12
    assert ids[-1] == EOS
    assert len(notes) == 1
    assert "text.length=12" in notes[0]


@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
def test_word_by_word_gives_what_the_library_gives(tokenizer):
    vocabulary = build(**{**SMALL, "length": 200}, tokenizer=tokenizer).vocabulary
    odd = [
        "a cat's  hat",
        "tab\there",
        "",
        "  lead",
        "trail ",
        "naïve café — 12,5 €!",
        "we'll don't x",
        "e\u0301 \u0301x",
    ]
    for caption in [
        *CAPTIONS,
        *odd,
        "👩‍👩‍👧 ok",
        "3.14 a-b_c",
        "nbsp\u00a0here",
        "line\nbreak",
        "İstanbul ǅ",
        "a RED 3",
    ]:
        whole = vocabulary.tokenizer.encode(caption, add_special_tokens=False).ids
        assert vocabulary.ids(caption)[: len(whole) + 2] == (BOS, *whole, EOS)


def test_words_are_tokenized_once():
    text = build(**SMALL)
    for number in range(5):
        text.encode([f"a red {number}", f"a blue {number}"])
    assert text.vocabulary._pieces.cache_info().misses == 8  # a, red, blue and five numbers


def test_the_vocabulary_travels_as_an_asset():
    first = build(**SMALL)
    assets = json.loads(json.dumps(first.assets()))
    again = build(captions=[], assets=assets, **SMALL)
    again.load_state_dict(first.state_dict())
    torch.testing.assert_close(first.encode(["the blue 3"])[0], again.encode(["the blue 3"])[0])


def test_words_and_their_order_matter_and_padding_does_not():
    text = build(**SMALL, positions="learned").eval()
    a, mask = text.encode(["a red 3"])
    b, _ = text.encode(["3 red a"])
    assert not torch.allclose(a[mask], b[mask], atol=1e-2)
    longer = build(**{**SMALL, "length": 20}, positions="learned")
    state = {k: v for k, v in text.state_dict().items() if "positions" not in k}
    longer.load_state_dict(state, strict=False)
    with torch.no_grad():
        longer.positions.tables[0][:12] = text.positions.tables[0]
    c, _ = longer.encode(["a red 3"])
    torch.testing.assert_close(a[:, :5], c[:, :5])


def test_with_rotary_positions_order_matters_and_the_place_does_not():
    text = build(**SMALL, positions="rotary").eval()
    assert not any("positions" in name for name in text.state_dict())
    a, mask = text.encode(["a red 3"])
    b, _ = text.encode(["3 red a"])
    assert not torch.allclose(a[mask].sum(0), b[mask].sum(0), atol=1e-2)
    ids = text.vocabulary.batch(["a red 3"])
    moved = torch.cat([ids[:, -4:], ids[:, :-4]], dim=1)  # the same behind four tokens that nobody sees
    c = text.transformer(text.tokens(moved), moved != PAD)
    torch.testing.assert_close(c[:, 4:9], a[:, :5])


def test_tokens_are_as_large_as_what_blocks_add_and_no_larger_than_their_places():
    assert build(**SMALL).tokens.weight.std().item() == pytest.approx(1, rel=0.05)
    placed = build(**SMALL, positions="learned")
    assert placed.tokens.weight.std().item() == pytest.approx(placed.positions.tables[0].std().item(), rel=0.2)


@pytest.mark.parametrize("depth", [0, 2])
def test_without_positions_words_alone_count(depth):
    text = build(**{**SMALL, "depth": depth}, positions="none").eval()
    (a, mask), (b, _) = text.encode(["a red 3 moves left"]), text.encode(["left moves a red 3"])
    torch.testing.assert_close(a[mask].sum(0), b[mask].sum(0))
    assert not torch.allclose(a[mask].sum(0), text.encode(["a red 7 moves left"])[0][mask].sum(0), atol=1e-3)


def test_depth_zero_and_dropout():
    bare = build(**{**SMALL, "depth": 0}, positions="learned")
    assert bare.transformer is None
    assert bare.encode(["a red 3"])[0].shape == (1, 12, 16)
    noisy = build(**SMALL, dropout=0.5)
    assert not torch.equal(noisy.encode(["a red 3"])[0], noisy.encode(["a red 3"])[0])


# null text


@pytest.mark.parametrize("keys", [SMALL, {"kind": "given", "width": 16, "length": 12}])
def test_dropped_rows_become_the_null_token_and_others_stay(keys):
    text = build(**keys)
    embeddings, mask = torch.randn(3, 12, 16), torch.ones(3, 12, dtype=torch.bool)
    mask[2] = False  # a row without any token can only be null
    dropped, kept = text.drop(embeddings, mask, torch.tensor([True, False, False]))
    assert kept.tolist() == [[True] + [False] * 11, [True] * 12, [True] + [False] * 11]
    torch.testing.assert_close(dropped[1], embeddings[1])
    torch.testing.assert_close(dropped[0], dropped[2])
    torch.testing.assert_close(dropped[0, 0], text.null.token.detach())
    dropped.sum().backward()
    assert text.null.token.grad.abs().sum() > 0


def test_given_text_has_no_encoder():
    with pytest.raises(InputError, match=r"text\.kind=given"):
        build(kind="given", width=8).encode(["a"])


def test_none_is_no_text():
    assert build(kind="none") is None


# config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "t5"}, "needs name"),
        ({"kind": "given"}, "needs width"),
        ({"kind": "none", "length": 12}, "length is for kind"),
        ({"kind": "clip", "name": "x", "vocabulary": 300}, "vocabulary is for kind learned only"),
        ({"kind": "t5", "name": "x", "positions": "none"}, "positions is for kind learned only"),
        ({"depth": 0}, "depth=0 has none: raise depth, or set positions=none"),
        ({"width": 30}, "multiple of"),
        ({"witdh": 3}, "width"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse(TextConfig, keys, "text")


def test_a_resolved_config_reads_back():
    for config in (TextConfig(), TextConfig(kind="none"), TextConfig(kind="given", width=8)):
        assert parse(TextConfig, config.model_dump(), "text") == config


# T5 and CLIP, with random weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

    torch.manual_seed(0)
    words = ["<pad>", "</s>", "<unk>", "<s>", *["a", "red", "blue", "green", "3", "7", "cat", "moves", "left", "up"]]
    root, found = tmp_path_factory.mktemp("text"), {}
    for kind in ("t5", "clip"):
        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        folder = root / kind
        PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(folder)
        if kind == "t5":
            model = T5EncoderModel(T5Config(vocab_size=16, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3))
        else:
            shape = {
                "vocab_size": 16,
                "hidden_size": 24,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
            }
            model = CLIPTextModel(
                CLIPTextConfig(**shape, max_position_embeddings=10, eos_token_id=1, bos_token_id=3, pad_token_id=0)
            )
        model.save_pretrained(folder)
        found[kind] = folder
    return found


@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_pretrained_encoders_load_from_a_folder(folders, kind):
    notes = []
    text = build(kind=kind, name=str(folders[kind]), length=6, notes=notes)
    assert text.width == 24
    assert list(task_state_dict(text)) == ["null.token"]  # the encoder is not saved with the stage
    embeddings, mask = text.encode(["a red 3", "a blue cat moves left up"])
    assert embeddings.shape == (2, 6, 24)
    assert mask.sum(1).tolist() == [4, 6]
    assert not embeddings.requires_grad
    assert (embeddings[0, 4:] == 0).all()
    assert len(notes) == 1
    assert "text.length=6" in notes[0]
    alone, _ = text.encode(["a red 3"])
    torch.testing.assert_close(alone[0], embeddings[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(embeddings[0], embeddings[1], atol=1e-3)
    text.train()
    assert not text._parts["model"].training
    assert [p.shape for p in text.parameters() if p.requires_grad] == [(24,)]


def test_a_file_that_was_cut_short_is_named_at_the_start_and_when_it_is_read(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "t5")
    file = tmp_path / "t5" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    config = TextConfig(kind="t5", name=str(tmp_path / "t5"), length=6)
    with pytest.raises(
        InputError, match=r"model\.safetensors is not a complete safetensors file.*copy or download it again"
    ):
        config.check_pretrained((), hub=False)
    with pytest.raises(InputError, match="cannot be loaded as t5"):
        build(kind="t5", name=str(tmp_path / "t5"), length=6).encode(["a"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_they_answer_what_transformers_does_with_its_own_mask(folders, kind, attention):
    text = build(kind=kind, name=str(folders[kind]), length=6)
    text.encode(["a"])
    model = text._parts["model"]
    model.set_attn_implementation(attention)
    captions = ["a red 3", "a blue cat moves left up", ""]
    found, mask = text.encode(captions)
    ids, _ = text._parts["tokenizer"](captions, torch.device("cpu"))
    expected = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state * mask[..., None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("captions", [["a red 3", "7"], ["a blue cat moves left up"] * 2], ids=["padded", "full"])
@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_a_step_never_waits_for_the_device(folders, kind, captions):
    text = build(kind=kind, name=str(folders[kind]), length=6)
    text.encode(captions)  # loads it
    with NoWaiting():
        encode_captions(text, captions)
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        text._parts["model"](input_ids=torch.ones(1, 6, dtype=torch.long), attention_mask=torch.ones(1, 6).long())


@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_autocast_does_not_reach_an_encoder(folders, kind):
    """T5 has activations beyond the largest number of fp16."""
    text = build(kind=kind, name=str(folders[kind]), length=6)
    expected, _ = text.encode(["a red 3"])
    with torch.autocast("cpu", dtype=torch.float16):
        found, _ = text.encode(["a red 3"])
    assert torch.equal(found, expected)


def test_loading_an_encoder_prints_nothing(folders, capfd):
    build(kind="t5", name=str(folders["t5"]), length=6).encode(["a red 3"])
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_a_step_on_the_gpu_never_waits(folders, kind):
    text = build(kind=kind, name=str(folders[kind]), length=6).cuda()
    captions = ["a red 3", "7"]
    expected, _ = encode_captions(text, captions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, _ = encode_captions(text, captions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_padding_may_be_read_as_cogvideox_reads_it(folders):
    """No mask for the encoder, and none for the model: what transformers gives for padded ids alone."""
    hidden, read = (build(kind="t5", name=str(folders["t5"]), length=6, padding=p) for p in ("hidden", "read"))
    embeddings, mask = read.encode(["a red 3"])
    assert mask.all()
    ids, _ = read._parts["tokenizer"](["a red 3"], torch.device("cpu"))
    torch.testing.assert_close(embeddings, read._parts["model"](input_ids=ids).last_hidden_state)
    assert (hidden.encode(["a red 3"])[0][0, 4:] == 0).all()
    assert embeddings[0, 4:].abs().sum() > 0


def test_a_tokenizer_may_lie_beside_the_encoder_as_in_diffusers_folders(folders, tmp_path):
    shutil.copytree(folders["t5"], tmp_path / "text_encoder")
    (tmp_path / "tokenizer").mkdir()
    for path in (tmp_path / "text_encoder").glob("tokenizer*"):
        path.rename(tmp_path / "tokenizer" / path.name)
    text = build(kind="t5", name=str(tmp_path / "text_encoder"), length=6)
    assert torch.equal(
        text.encode(["a red 3"])[0], build(kind="t5", name=str(folders["t5"]), length=6).encode(["a red 3"])[0]
    )


def test_a_released_encoder_is_loaded_again_when_asked(folders):
    text = build(kind="t5", name=str(folders["t5"]), length=6)
    before, _ = text.encode(["a red 3"])
    text.release()
    assert not text._parts
    assert torch.equal(text.encode(["a red 3"])[0], before)


def test_nothing_is_loaded_before_a_caption_is_read(folders, monkeypatch):
    text = build(kind="t5", name=str(folders["t5"]))
    monkeypatch.setattr(text, "_load", lambda device: pytest.fail("loaded"))
    text.drop(torch.zeros(1, 64, 24), torch.ones(1, 64, dtype=torch.bool), torch.tensor([True]))
    assert build(kind="t5", name="some-owner/some-t5", width=768).width == 768


def test_missing_folders_and_files_are_named(folders, tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        build(kind="t5", name=str(tmp_path / "nowhere"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / f"without-{name}"
        shutil.copytree(folders["t5"], folder)
        (folder / name).unlink()
        with pytest.raises(InputError, match=f"lacks.*{name}"):
            build(kind="t5", name=str(folder))


def test_a_hub_name_that_cannot_be_reached_is_an_input_error():
    with pytest.raises(InputError, match=r"text\.name=nobody/nothing"):
        build(kind="clip", name="nobody/nothing")


def test_lengths_and_widths_that_the_weights_do_not_have(folders):
    """Whether a caption is read, or it is only looked whether one could be."""
    long, wide = ({"kind": "clip", "length": 11}, "at most 10"), ({"kind": "t5", "width": 32}, "24 channels")
    for keys, message in (long, wide):
        keys = keys | {"name": str(folders[keys["kind"]])}
        with pytest.raises(InputError, match=message):
            build(**keys).encode(["a"])
        config = TextConfig(**keys)
        with pytest.raises(InputError, match=message):
            config.check_pretrained([], hub=False)
        config.check_pretrained(["text_embeds"], False)  # is never asked


def test_an_encoder_is_looked_for_without_loading_it(folders, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.T5EncoderModel, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    TextConfig(kind="t5", name=str(folders["t5"])).check_pretrained([], False)
    shutil.copytree(folders["t5"], tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    gone = TextConfig(kind="t5", name=str(tmp_path / "bare"), width=24)
    with pytest.raises(InputError, match=r"^text\.name=.*bare lacks a tokenizer"):
        gone.check_pretrained([], False)
    with FakeTensorMode(allow_non_fake_inputs=True):  # its size is known
        assert build(**gone.model_dump(exclude_unset=True)).width == 24
    hub = TextConfig(kind="t5", name="nobody/nothing", width=24)
    hub.check_pretrained([], hub=False)
    with pytest.raises(InputError, match=r"^text\.name=nobody/nothing"):
        hub.check_pretrained([], hub=True)
