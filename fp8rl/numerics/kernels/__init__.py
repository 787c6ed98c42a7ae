"""The shared ops as Triton kernels for Hopper GPUs. `numerics.ops` defines them and is their oracle: a function that
has an op's name is its kernel, and computes what the op's docstring says.

Tiles have one size whatever the number of rows, and sums run in one order, so that every kernel is row-invariant. The
number of rows is no constant of theirs (`do_not_specialize`): one compiled kernel serves batches of all sizes. Where
Triton's interpreter runs them (TRITON_INTERPRET=1 on a CPU) and where a GPU does, the quantizers give the same bits;
products and reductions differ by their order of addition.
"""
