"""Both halves of a federation whose clients are elsewhere, whatever carries their messages: Flower, or NVIDIA FLARE."""
