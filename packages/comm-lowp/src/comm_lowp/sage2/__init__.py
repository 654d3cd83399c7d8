"""The Sage2 encoding of Q, K and V: geometry (`grid`) and primitives."""
