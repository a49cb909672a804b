"""Numbers that several folders share, in a module that imports nothing."""

IGNORE_INDEX = -100  # the label of a token that is not learned, as in PyTorch's cross entropy
