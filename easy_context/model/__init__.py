"""A checkpoint before training: its config and RoPE base, its weights, Liger's layers."""
