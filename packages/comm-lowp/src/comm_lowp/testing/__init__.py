"""What tests of the encoding use, also those of kernels and of whoever exchanges payloads of their own.

`oracle` computes the consumer's operands in NumPy straight from the definitions; `cases` makes inputs that show
mistakes, and runs the primitives for all ranks in one process. Needs ``comm-lowp[test]``.
"""
