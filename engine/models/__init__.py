"""Target models: configuration, weights on disk, and the forward passes over them."""
