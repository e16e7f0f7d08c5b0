"""Models: lists of blocks with inputs and outputs."""
