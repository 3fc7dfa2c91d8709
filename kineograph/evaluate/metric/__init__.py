"""One metric a file: METRIC is a class that fits metric_api.Metric. `--metrics NAME` finds it by the file's name."""
