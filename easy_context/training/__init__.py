"""The parts of train.py: flags and their checks, Accelerate and DeepSpeed, rows, metrics, saving and resuming."""
