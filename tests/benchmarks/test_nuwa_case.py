"""NUWA's case has as many parameters as the peer."""

import pytest
import torch

from benchmarks.cases import nuwa

PEER = 71_967_104  # trainable parameters of nuwa-pytorch 0.7.8 at the full sizes, without its VQGAN


def test_full_size_matches_the_peer():
    with torch.device("meta"):
        task = nuwa._build_our_model(nuwa.TRAIN)
    assert task.text.vocabulary.size == nuwa.TRAIN["words"]
    assert sum(p.numel() for p in task.parameters()) == pytest.approx(PEER, rel=0.05)
    assert task.grid == (10, 16, 16)
    assert task.vocabulary == 512


def test_captions_fill_the_text():
    captions = nuwa._make_captions(nuwa.TRAIN)
    assert len(set(captions)) == nuwa.TRAIN["batch"]
    assert min(len(caption.split()) for caption in captions) >= nuwa.TRAIN["length"]
