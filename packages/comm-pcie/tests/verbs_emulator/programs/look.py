"""An emulated fabric as pyverbs sees it: a second program that was written against the real libraries.

Run by the interpreter that has pyverbs, with the emulator preloaded; prints one line of JSON.
"""

# pyverbs belongs to another interpreter.
# pyright: reportMissingImports=false

import json
import sys

import pyverbs.enums as e
import pyverbs.providers.mlx5.mlx5_enums as dv
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.providers.mlx5.mlx5dv import Mlx5Context, Mlx5DVContextAttr, Mlx5DVQPInitAttr, Mlx5QP
from pyverbs.providers.mlx5.mlx5dv_mkey import Mlx5Mkey, Mlx5MrInterleaved
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPAttr, QPCap, QPInitAttrEx
from pyverbs.wr import SGE, RecvWR

ROWS, WIDTH, PITCH = 32, 48, 160


class Side:
    """A NIC with a queue pair and a region."""

    def __init__(self, name):
        self.context = Mlx5Context(Mlx5DVContextAttr(flags=dv.MLX5DV_CONTEXT_FLAGS_DEVX), name)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 64, None, None, 0)
        self.mr = MR(self.pd, ROWS * PITCH, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
        init = QPInitAttrEx(
            qp_type=e.IBV_QPT_RC,
            scq=self.cq,
            rcq=self.cq,
            cap=QPCap(max_send_wr=16, max_recv_wr=4, max_inline_data=128),
            pd=self.pd,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=e.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
        )
        extra = Mlx5DVQPInitAttr(
            comp_mask=dv.MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
            send_ops_flags=dv.MLX5DV_QP_EX_WITH_MR_INTERLEAVED,
        )
        self.qp = Mlx5QP(self.context, init, extra)

    def connect(self, other):
        """To RTS."""
        gid = other.context.query_gid(1, 0).gid
        route = GlobalRoute(dgid=GID(gid), sgid_index=0, hop_limit=64)
        attr = QPAttr(port_num=1)
        attr.path_mtu, attr.dest_qp_num = e.IBV_MTU_1024, other.qp.qp_num
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.rq_psn = attr.sq_psn = 0
        self.qp.to_rts(attr)

    def poll(self):
        """Return the next completion."""
        for _ in range(100000):
            count, found = self.cq.poll()
            if count:
                return [found[0].status, found[0].opcode, found[0].wr_id]
        raise SystemExit("no completion")


def main():
    """Describe a band, write it, and tell what was seen."""
    one, other = Side("mlx5_0"), Side("mlx5_1")
    one.connect(other)
    other.connect(one)
    packed = bytes(range(256)) * (ROWS * PITCH // 256)
    one.mr.write(packed, len(packed))
    key = Mlx5Mkey(one.pd, dv.MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, 2)
    one.qp.wr_start()
    one.qp.wr_id = 7
    one.qp.wr_flags = e.IBV_SEND_INLINE | e.IBV_SEND_SIGNALED
    band = Mlx5MrInterleaved(addr=one.mr.buf, bytes_count=WIDTH, bytes_skip=PITCH - WIDTH, lkey=one.mr.lkey)
    one.qp.wr_mr_interleaved(key, e.IBV_ACCESS_LOCAL_WRITE, ROWS, [band])
    one.qp.wr_complete()
    umr = one.poll()
    # A receive needs a piece of memory in pyverbs, whatever is done with it.
    other.qp.post_recv(RecvWR(wr_id=8, num_sge=1, sg=[SGE(other.mr.buf, 1, other.mr.lkey)]))
    one.qp.wr_start()
    one.qp.wr_id = 9
    one.qp.wr_flags = e.IBV_SEND_SIGNALED
    one.qp.wr_rdma_write_imm(other.mr.rkey, other.mr.buf, 5)
    one.qp.wr_set_sge(SGE(0, ROWS * WIDTH, key.lkey))
    one.qp.wr_complete()
    sent, received = one.poll(), other.poll()
    got = other.mr.read(ROWS * WIDTH, 0)
    expected = b"".join(packed[row * PITCH : row * PITCH + WIDTH] for row in range(ROWS))
    port = one.context.query_port(1)
    state, _ = one.qp.query(e.IBV_QP_STATE)
    try:
        PD(one.context)
        refused = False
    except PyverbsError:
        refused = True
    answer = {
        "devices": [device.name.decode() for device in get_device_list()],
        "port": [port.state, port.link_layer, port.active_mtu, port.max_msg_sz],
        "gids": [
            [item.gid_index, item.gid_type, item.ndev_ifindex, item.gid_str()]
            for item in one.context.query_gid_table(16)
        ],
        "umr": umr,
        "sent": sent,
        "received": received,
        "equal": got == expected,
        "state": state.qp_state,
        "refused": refused,
    }
    print(json.dumps(answer))
    key.close()
    for side in (one, other):
        for item in (side.qp, side.mr, side.cq, side.pd, side.context):
            item.close()


if __name__ == "__main__":
    sys.exit(main())
