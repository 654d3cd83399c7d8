// The module of the all-reduce of this plugin.
#include <comm_core/allreduce_module.cuh>

COMM_ALLREDUCE_MODULE(comm_nvlink)
