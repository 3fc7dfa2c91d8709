"""One metric a file: a class that fits evaluate.evidence.Metric, named METRIC. `--metrics NAME` finds it by the file's name."""
