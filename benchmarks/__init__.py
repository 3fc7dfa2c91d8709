"""Speed of training and sampling, compared with other implementations: `python -m benchmarks [CASE …] [--peer]`."""
