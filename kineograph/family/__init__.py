"""The model families: network, config and Task of each."""
