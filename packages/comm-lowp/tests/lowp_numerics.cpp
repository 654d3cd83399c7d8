// The scalar arithmetic and the geometry of the kernels as functions over arrays, for
// test_lowp_numerics.py. Compiled by a plain host compiler, without any of CUDA.
#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>
#include <comm_lowp/numerics.cuh>

using comm_lowp::Bfloat16;
using comm_lowp::Float16;

extern "C" {

void narrow(const float* x, uint16_t* out, uint64_t n, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i)
    out[i] = uint16_t(bfloat16 ? Bfloat16::narrow(x[i]) : Float16::narrow(x[i]));
}

void widen(const uint16_t* x, float* out, uint64_t n, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i) out[i] = bfloat16 ? Bfloat16::widen(x[i]) : Float16::widen(x[i]);
}

void halves(const uint32_t* x, float* out, uint64_t n, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i) {
    out[2 * i] = bfloat16 ? Bfloat16::low(x[i]) : Float16::low(x[i]);
    out[2 * i + 1] = bfloat16 ? Bfloat16::high(x[i]) : Float16::high(x[i]);
  }
}

void extremes(const uint32_t* a, const uint32_t* b, uint32_t* out, uint64_t n, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i) {
    out[3 * i] = bfloat16 ? comm_lowp::max_pair<Bfloat16>(a[i], b[i])
                          : comm_lowp::max_pair<Float16>(a[i], b[i]);
    out[3 * i + 1] = bfloat16 ? comm_lowp::min_pair<Bfloat16>(a[i], b[i])
                              : comm_lowp::min_pair<Float16>(a[i], b[i]);
    out[3 * i + 2] = bfloat16 ? comm_lowp::max_magnitude<Bfloat16>(a[i], b[i] & 0x7fff7fffu)
                              : comm_lowp::max_magnitude<Float16>(a[i], b[i] & 0x7fff7fffu);
  }
}

void e4m3(const float* x, uint8_t* out, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) out[i] = uint8_t(comm_lowp::e4m3_code(x[i]));
}

void e4m3_pairs(const float* x, uint16_t* out, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) out[i] = uint16_t(comm_lowp::e4m3_pair(x[2 * i], x[2 * i + 1]));
}

void int8(const float* x, int8_t* out, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) out[i] = int8_t(comm_lowp::int8_code(x[i]) & 0xff);
}

void scales(const float* amax, float* scale, float* inverse, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    scale[i] = comm_lowp::int8_scale(amax[i]);
    inverse[i] = comm_lowp::int8_inverse(amax[i]);
  }
}

void factors(const float* v_scale, float* out, uint64_t n, float v_max, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i)
    out[i] = bfloat16 ? comm_lowp::v_factor<Bfloat16>(v_scale[i], v_max)
                      : comm_lowp::v_factor<Float16>(v_scale[i], v_max);
}

void means(const float* sum, uint16_t* out, uint64_t n, uint32_t used, int bfloat16) {
  for (uint64_t i = 0; i < n; ++i)
    out[i] = uint16_t(bfloat16 ? comm_lowp::k_mean<Bfloat16>(sum[i], used)
                               : comm_lowp::k_mean<Float16>(sum[i], used));
}

void transpose(uint32_t* words) {
  uint32_t rows[4] = {words[0], words[1], words[2], words[3]};
  comm_lowp::transpose_bytes(rows);
  for (int i = 0; i < 4; ++i) words[i] = rows[i];
}

uint32_t pack(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return comm_lowp::pack_bytes(a, b, c, d);
}

uint32_t constant(int which) {
  return which == 0   ? comm_lowp::kEpsBits
         : which == 1 ? comm_lowp::kIdleScaleBits
         : which == 2 ? Float16::kInfinity
                      : Bfloat16::kInfinity;
}

uint32_t v_row(uint32_t x) { return comm_lowp::v_row(x); }

// Of a group: slots, first, last, touched; then the ranks that touch `group`.
void grid(uint32_t rank, uint32_t local, uint32_t world, uint32_t log2, uint32_t group,
          uint32_t* out) {
  out[0] = comm_lowp::slots(local, log2);
  out[1] = comm_lowp::first_group(rank, local, log2);
  out[2] = comm_lowp::last_group(rank, local, log2);
  out[3] = comm_lowp::touched(rank, local, log2);
  out[4] = comm_lowp::first_toucher(group, local, log2);
  out[5] = comm_lowp::last_toucher(group, local, world, log2);
}

void geometry(const comm_lowp::Geometry* g, uint32_t sequence, uint64_t* out) {
  comm_lowp::Payload p = comm_lowp::payload(*g);
  comm_lowp::Statistics s = comm_lowp::statistics(*g);
  uint64_t all[] = {p.k,
                    p.v,
                    p.q_scale,
                    p.k_scale,
                    p.end,
                    p.chunk_bytes,
                    p.q_slots,
                    p.k_slots,
                    comm_lowp::live_rows(*g),
                    comm_lowp::q_scale_width(*g, sequence),
                    comm_lowp::k_scale_width(*g, sequence),
                    comm_lowp::padded_sequence(*g),
                    s.v_amax,
                    s.q_desc,
                    s.k_minmax,
                    s.count};
  for (unsigned i = 0; i < sizeof(all) / sizeof(*all); ++i) out[i] = all[i];
}

}  // extern "C"
