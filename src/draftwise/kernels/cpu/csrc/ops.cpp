#include "ops.h"

#include <cstring>

#include "boundary.h"

namespace dw {
namespace {

// Elements of work below which a second thread costs more than it brings.
constexpr int64_t SERIAL = 1 << 14;

const RowKernels& kernels(DType dtype) {
  int i = dtype == BF16 ? 1 : 0;
  switch (isa_of_vectors()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return row_kernels_avx512[i];
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return row_kernels_avx512vnni[i];
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return row_kernels_avx2[i];
#endif
    default: return row_kernels_portable[i];
  }
}

// Calls body(begin, end) over all rows, in one piece or in pieces of some `SERIAL` elements.
template <class Body>
void over_rows(Pool* pool, int64_t rows, int64_t width, const Body& body) {
  if (rows * width < 2 * SERIAL || rows < 2) {
    body((int64_t)0, rows);
    return;
  }
  int64_t piece = SERIAL / width;
  if (piece < 1) piece = 1;
  struct Context {
    const Body* body;
    int64_t piece, rows;
  } context{&body, piece, rows};
  parallel_for(
      pool, (int)((rows + piece - 1) / piece),
      [](void* arg, int task, int) {
        const Context& c = *(const Context*)arg;
        int64_t begin = task * c.piece, end = begin + c.piece;
        (*c.body)(begin, end < c.rows ? end : c.rows);
      },
      &context);
}

}  // namespace

void rms_norm(Pool* pool, DType dtype, const void* x, const float* weight, float eps, void* out, int64_t rows,
              int64_t width) {
  over_rows(pool, rows, width, [&](int64_t begin, int64_t end) {
    kernels(dtype).rms_norm(x, weight, eps, out, width, begin, end);
  });
}

void add_rms_norm(Pool* pool, DType dtype, const void* x, void* residual, const float* weight, float eps, void* out,
                  int64_t rows, int64_t width) {
  over_rows(pool, rows, width, [&](int64_t begin, int64_t end) {
    kernels(dtype).add_rms_norm(x, residual, weight, eps, out, width, begin, end);
  });
}

void add_rows(Pool* pool, DType dtype, const void* x, void* residual, int64_t rows, int64_t width) {
  over_rows(pool, rows, width,
            [&](int64_t begin, int64_t end) { kernels(dtype).add(x, residual, width, begin, end); });
}

void concat_rows(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes, void* out, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    char* to = (char*)out + r * (a_bytes + b_bytes);
    memcpy(to, (const char*)a + r * a_bytes, (size_t)a_bytes);
    memcpy(to + a_bytes, (const char*)b + r * b_bytes, (size_t)b_bytes);
  }
}

void clear_first_rows(void* x, const int64_t* positions, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; r++)
    if (positions[r] == 0) memset((char*)x + r * bytes, 0, (size_t)bytes);
}

void softmax(const float* x, float scale, float* out, int64_t width) { kernels(F32).softmax(x, scale, out, width); }

void silu_mul(Pool* pool, DType dtype, const void* gate_up, void* out, int64_t rows, int64_t width) {
  // an exponential costs about four plain elements
  over_rows(pool, rows, 4 * width, [&](int64_t begin, int64_t end) {
    kernels(dtype).silu_mul(gate_up, out, width, begin, end);
  });
}

void silu_add(DType dtype, const void* x, const void* residual, void* out, int64_t width) {
  kernels(dtype).silu_add(x, residual, out, width);
}

void rope_write(Pool* pool, DType dtype, const RopeCall* call) {
  for (int64_t r = 0; r < call->rows; r++) require(call->slots[r] >= 0 && call->slots[r] < call->num_slots, "slot");
  int64_t width = (int64_t)(call->num_heads + (call->latent != 0 ? 1 : 2) * call->num_kv_heads) * call->head_dim;
  over_rows(pool, call->rows, width,
            [&](int64_t begin, int64_t end) { kernels(dtype).rope_write[call->kv_dtype](call, begin, end); });
}

void gather_rows(const void* table, int64_t table_rows, const int64_t* ids, void* out, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; r++) {
    require(ids[r] >= 0 && ids[r] < table_rows, "id");
    memcpy((char*)out + r * bytes, (const char*)table + ids[r] * bytes, (size_t)bytes);
  }
}

}  // namespace dw

// ------------------------------------------------------------------------------------------------------ C interface

DW_EXPORT void dw_rms_norm(dw::Pool* pool, int dtype, const void* x, const float* weight, float eps, void* out,
                           int64_t rows, int64_t width) {
  dw::guarded([&] { dw::rms_norm(pool, (dw::DType)dtype, x, weight, eps, out, rows, width); });
}

DW_EXPORT void dw_add_rms_norm(dw::Pool* pool, int dtype, const void* x, void* residual, const float* weight, float eps,
                               void* out, int64_t rows, int64_t width) {
  dw::guarded([&] { dw::add_rms_norm(pool, (dw::DType)dtype, x, residual, weight, eps, out, rows, width); });
}

DW_EXPORT void dw_silu_mul(dw::Pool* pool, int dtype, const void* gate_up, void* out, int64_t rows, int64_t width) {
  dw::guarded([&] { dw::silu_mul(pool, (dw::DType)dtype, gate_up, out, rows, width); });
}

DW_EXPORT void dw_rope_write(dw::Pool* pool, int dtype, const dw::RopeCall* call) {
  dw::guarded([&] { dw::rope_write(pool, (dw::DType)dtype, call); });
}

DW_EXPORT void dw_gather_rows(const void* table, int64_t table_rows, const int64_t* ids, void* out, int64_t rows,
                              int64_t bytes) {
  dw::guarded([&] { dw::gather_rows(table, table_rows, ids, out, rows, bytes); });
}
