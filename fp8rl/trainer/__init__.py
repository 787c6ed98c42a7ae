"""The Megatron-core trainer: model, parallelism, optimizer, checkpoints and the Ray actors that run them."""
