import numpy as np
import pytest

from kineograph.core.protocols import MixShare
from kineograph.data.order import permute, pick_in_order, pick_mixed, pick_replacement, pick_shuffled, split_batches


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_permutes(count):
    assert sorted(permute(np.arange(count), count, 7).tolist()) == list(range(count))


def test_keys_give_different_orders():
    orders = {tuple(permute(np.arange(20), 20, key).tolist()) for key in range(50)}
    assert len(orders) == 50


def test_positions_are_spread_evenly():
    """Over many keys each item comes first equally often."""
    firsts = np.bincount([int(permute(np.array([0]), 10, key)[0]) for key in range(2000)], minlength=10)
    assert firsts.min() > 130
    assert firsts.max() < 270


def test_every_epoch_holds_every_item_in_its_own_order():
    whole = pick_shuffled(3, np.arange(30), 10)
    epochs = [whole[start : start + 10].tolist() for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_part_equals_the_whole():
    whole = pick_shuffled(3, np.arange(100), 7)
    assert (pick_shuffled(3, np.arange(40, 63), 7) == whole[40:63]).all()
    assert pick_shuffled(3, np.array([55]), 7)[0] == whole[55]


def test_endless_sources():
    large = pick_shuffled(0, np.arange(10**12, 10**12 + 1000), 2**40)
    assert len(set(large.tolist())) == 1000
    assert large.min() >= 0
    assert large.max() < 2**40
    assert large.std() > 2**40 / 5  # all over the range


def test_replacement_is_a_pure_function():
    assert pick_replacement(1, 5, 0, 100) == pick_replacement(1, 5, 0, 100)
    assert len({pick_replacement(1, 5, attempt, 10**6) for attempt in range(20)}) == 20
    assert all(0 <= pick_replacement(seed, 5, 0, 3) < 3 for seed in range(50))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13, 256, 257])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_validation_is_spread_over_ranks(count, batch_size, world):
    parts = split_batches(count, batch_size, world)
    assert all(
        len(part) == world and all(len(share.indices) for share in part) for part in parts
    )  # no rank waits in vain
    counted = [np.concatenate([share.indices for share in part if not share.spare]).tolist() for part in parts]
    assert [place for batch in counted for place in batch] == list(range(count))
    if world <= batch_size:  # the same batches for one process
        assert counted == [part[0].indices.tolist() for part in split_batches(count, batch_size, 1)]
    assert max(len(share.indices) for part in parts for share in part) <= -(-max(batch_size, world) // world)


SHARES = (MixShare(10, 20), MixShare(4, 4), MixShare(50, 8))  # twice an epoch, once, and 8 of 50


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mix_draws_each_part_as_often_as_its_share_says(shuffle):
    epoch = sum(share.draws for share in SHARES)
    whole = pick_mixed(3, np.arange(6 * epoch), SHARES, shuffle)
    for number in range(6):
        counts = np.bincount(whole[number * epoch : (number + 1) * epoch], minlength=64)
        assert (counts[:10] == 2).all() and (counts[10:14] == 1).all() and counts[14:].sum() == 8
    seen = whole[whole >= 14]
    assert len(set(seen[:48].tolist())) == 48  # each once before any comes again, across epochs
    assert (whole[:epoch].tolist() == whole[epoch : 2 * epoch].tolist()) is False
    assert (pick_mixed(3, np.arange(40, 63), SHARES, shuffle) == whole[40:63]).all()


def test_parts_of_a_mix_are_mixed():
    whole = pick_mixed(3, np.arange(32), SHARES)
    assert len(set((whole[:12] // 10).tolist())) > 1


def test_without_shuffling_items_come_in_their_order():
    assert pick_in_order(np.arange(5, 9), 3).tolist() == [2, 0, 1, 2]
