"""Judging: caption accuracy, reconstruction quality, codebook use, comparison of runs."""
