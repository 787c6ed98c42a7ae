"""Implements the shared ops as Triton kernels for Hopper GPUs. `numerics.ops` defines the ops and is the oracle. A
function with an op's name is its kernel, and computes what the op's docstring says.

Tiles have one size whatever the number of rows, and sums run in one order, so that every kernel is row-invariant. The
number of rows is no constant of a kernel (`do_not_specialize`), so one compiled kernel serves batches of all sizes. In
Triton's interpreter (TRITON_INTERPRET=1 on a CPU) the quantizers give the same bits as on a GPU; products and
reductions differ by their order of addition.
"""
