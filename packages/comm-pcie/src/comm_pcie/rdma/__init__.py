"""The RDMA half of comm-pcie. Experimental: verified on an emulator only."""
