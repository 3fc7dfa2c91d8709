"""Tokens, latents and embeddings, encoded once and kept on disk under RUN/<stage>/cache/.

The cache is addressed by content. The key of an item covers the item (name, file size and time, caption, clip shape); the key of a
recipe covers how it is encoded (encoder weights and options, preprocessing, precision). Rows are found by both keys, so a changed item
or encoder simply has no row yet.

    pack-00000/       rows that one process appended: arrays, item keys, captions, and a header whose `done` is committed last
    <set key>/        a set: which row of which pack holds each item of the training data, written once all rows exist

keys.py makes the keys, pack.py writes and reads packs, store.py looks rows up, writes sets and prunes, fill.py encodes what is missing,
source.py is `data.source=cache`.
"""
