"""The RDMA half of comm-pcie: routes over NICs. Experimental, verified on an emulator only.

| module | what it holds |
|---|---|
| `facts`, `probe` | what there is: devices, ports and GIDs, by pyverbs or by sysfs |
| `planning` | which NIC and which GID each rank uses |
| `geometry`, `transfers` | what a call moves, as bands of bytes |
| `engine` | one rank's NIC, queue pairs and registered buffers |
| `port` | what the routes need of the device's memory: CUDA's, or the host's |
| `session`, `outputs`, `opening` | calls, registered outputs, and how a session is opened by the whole group |
"""
