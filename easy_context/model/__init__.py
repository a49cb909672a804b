"""Load and prepare a model before training: config and RoPE base, weights, adapters and Liger's layers."""
