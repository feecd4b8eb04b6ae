// What stands between the products of an attention block: q and k are turned by their positions, q is
// rounded for attention, k and v are put into their rows of the pool, where they are.

#include <algorithm>
#include <initializer_list>

#include "lanes.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// What a call is given; shapes as in kernels/rows.py.
template <typename Number>
struct Call {
  const float *q_TNH, *k_TKH, *v_TKH, *cos_TP, *sin_TP;
  const int32_t *pages_T, *rows_T;
  int64_t T, N, K, H, P, C, R;
  Number *out_TNH, *kv_C2KRH;
};

void store_one(float* to, float number) { *to = number; }

void store_one(BFloat16* to, float number) {
  BFloat16 numbers[kLanes];
  store(numbers, fill(number));
  *to = numbers[0];
}

template <typename Number>
void write_head(const float* x, int64_t first, int64_t H, Number* to) {
  int64_t h = first;
  for (; h + kLanes <= H; h += kLanes) store(to + h, load(x + h));
  for (; h < H; ++h) store_one(to + h, x[h]);
}

// Each pair (x[p], x[p + P]) is turned by its angle; the numbers from 2P on stay.
template <typename Number>
void turn_head(const float* x, const float* cos, const float* sin, int64_t P, int64_t H, Number* to) {
  int64_t p = 0;
  for (; p + kLanes <= P; p += kLanes) {
    const Lanes first = load(x + p), second = load(x + P + p), c = load(cos + p), s = load(sin + p);
    store(to + p, first * c - second * s);
    store(to + P + p, second * c + first * s);
  }
  for (; p < P; ++p) {
    const float first = x[p], second = x[P + p];
    store_one(to + p, first * cos[p] - second * sin[p]);
    store_one(to + P + p, second * cos[p] + first * sin[p]);
  }
  write_head(x, 2 * P, H, to);
}

template <typename Number>
void do_token(const Call<Number>& call, int64_t t) {
  const int64_t N = call.N, K = call.K, H = call.H, P = call.P;
  const float *cos = call.cos_TP + t * P, *sin = call.sin_TP + t * P;
  for (int64_t n = t * N; n < (t + 1) * N; ++n) {
    turn_head(call.q_TNH + n * H, cos, sin, P, H, call.out_TNH + n * H);
  }
  const int64_t page = call.pages_T[t], row = call.rows_T[t];
  if (page < 0 || page >= call.C || row < 0 || row >= call.R) return;  // padding
  for (int64_t k = 0; k < K; ++k) {
    const int64_t from = (t * K + k) * H;
    Number* key = call.kv_C2KRH + ((page * 2 * K + k) * call.R + row) * H;
    turn_head(call.k_TKH + from, cos, sin, P, H, key);
    write_head(call.v_TKH + from, 0, H, key + K * call.R * H);
  }
}

bool fits(const auto& sizes, std::initializer_list<int64_t> wanted) {
  return std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end());
}

template <typename Number>
ffi::Error run(Call<Number> call, void* out, void* kv) {
  call.out_TNH = static_cast<Number*>(out), call.kv_C2KRH = static_cast<Number*>(kv);
  share_rows(call.T, (call.N + 2 * call.K) * call.H, [&](int64_t t) { do_token(call, t); });
  return ffi::Error::Success();
}

ffi::Error RotateWrite(ffi::Buffer<ffi::F32> q_TNH, ffi::Buffer<ffi::F32> k_TKH,
                       ffi::Buffer<ffi::F32> v_TKH, ffi::Buffer<ffi::F32> cos_TP,
                       ffi::Buffer<ffi::F32> sin_TP, ffi::Buffer<ffi::S32> pages_T,
                       ffi::Buffer<ffi::S32> rows_T, ffi::AnyBuffer kv_C2KRH,
                       ffi::Result<ffi::AnyBuffer> out_TNH, ffi::Result<ffi::AnyBuffer> new_kv) {
  const auto q = q_TNH.dimensions(), kv = kv_C2KRH.dimensions(), cos = cos_TP.dimensions();
  if (q.size() != 3 || kv.size() != 5 || cos.size() != 2) {
    return ffi::Error::InvalidArgument("q, the pool or the cosines have another number of axes");
  }
  const int64_t T = q[0], N = q[1], H = q[2], C = kv[0], K = kv[2], R = kv[3], P = cos[1];
  if (!fits(k_TKH.dimensions(), {T, K, H}) || !fits(v_TKH.dimensions(), {T, K, H}) ||
      !fits(cos, {T, P}) || !fits(sin_TP.dimensions(), {T, P}) || 2 * P > H ||
      !fits(pages_T.dimensions(), {T}) || !fits(rows_T.dimensions(), {T}) ||
      !fits(kv, {C, 2, K, R, H}) || !fits(out_TNH->dimensions(), {T, N, H}) ||
      new_kv->dimensions() != kv) {
    return ffi::Error::InvalidArgument("the sizes of q, k, v, the angles and the pool do not fit");
  }
  if (new_kv->untyped_data() != kv_C2KRH.untyped_data()) {
    return ffi::Error::InvalidArgument("the pool is to be written where it is, and was copied");
  }
  const auto start = [&]<typename Number>(Number*) {
    const Call<Number> call{q_TNH.typed_data(),   k_TKH.typed_data(),   v_TKH.typed_data(),
                            cos_TP.typed_data(),  sin_TP.typed_data(),  pages_T.typed_data(),
                            rows_T.typed_data(),  T, N, K, H, P, C, R, nullptr, nullptr};
    return run(call, out_TNH->untyped_data(), new_kv->untyped_data());
  };
  const auto dtype = kv_C2KRH.element_type();
  if (out_TNH->element_type() != dtype) return ffi::Error::InvalidArgument("q is not the pool's dtype");
  if (dtype == ffi::BF16) return start(static_cast<BFloat16*>(nullptr));
  if (dtype == ffi::F32) return start(static_cast<float*>(nullptr));
  return ffi::Error::InvalidArgument("the pool is neither bfloat16 nor float32");
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rotate_write, jaxserve::RotateWrite,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
