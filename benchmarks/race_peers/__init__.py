"""`python -m benchmarks.race_peers RACE`: the public packages on the track of a `kineo race`, by the same judge."""
