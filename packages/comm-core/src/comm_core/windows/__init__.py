"""Windows: memory that peers write, signals between ranks, and plans executed on the device between them.

What every CUDA transport stands on, and a plain transport of its own (``backend="windows"``) to start from.
"""
