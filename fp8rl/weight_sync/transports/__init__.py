"""Sends tensors from the trainer's ranks to the engines. All files here have the interface `bridge.Transport`."""
