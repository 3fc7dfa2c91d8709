"""The composition root: config to stages to data, task and trainer."""
