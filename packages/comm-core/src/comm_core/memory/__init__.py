"""Memory: CUDA IPC buffers, raw pointers as tensors."""
