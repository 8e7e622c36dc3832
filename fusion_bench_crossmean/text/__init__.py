"""Text classification for FusionBench: data, a task pool that evaluates merged encoders, and a fine-tuning command."""
