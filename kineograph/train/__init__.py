"""The Trainer (the only loop), optimizers, EMA, checkpoints, trackers."""
