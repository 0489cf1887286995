"""The target on one GPU: paged attention by FlashInfer, CUDA graphs, verification on the device."""
