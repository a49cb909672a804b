"""Compare the package's speed with that of other libraries; docs/performance.md has the commands and the results.

`attention` measures one attention layer, `train_step` whole training steps.
"""
