"""A run's folder: config, manifest, metrics, checkpoints, models."""
