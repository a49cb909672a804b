"""What train.py calls: flags and their checks, Accelerate and DeepSpeed, rows, metrics, saving and resuming."""
