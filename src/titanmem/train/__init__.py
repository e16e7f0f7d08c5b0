"""Training: one loop from one CPU to many nodes. `train(config, folder)` is the whole of it."""
