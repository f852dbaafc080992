"""Both halves of a federation with clients elsewhere, for any carrier of messages, such as Flower or NVIDIA FLARE."""
