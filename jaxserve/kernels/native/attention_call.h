// The call of paged_attention with a pool of one dtype, in a library of its own: what it is given is
// checked, and computed as attention.h says.

#pragma once

#include "attention.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::attention {

namespace ffi = xla::ffi;

// What XLA is told of a pool's numbers; of float8_e4m3fn the bits, as in kernels/pool.py.
template <typename KV>
constexpr ffi::DataType kStored = ffi::F32;
template <>
inline constexpr ffi::DataType kStored<BFloat16> = ffi::BF16;
template <>
inline constexpr ffi::DataType kStored<int8_t> = ffi::S8;
template <>
inline constexpr ffi::DataType kStored<Float8> = ffi::U8;

template <typename KV>
ffi::Error Attend(ffi::AnyBuffer q_TNH, ffi::AnyBuffer kv_C2KRH,
                  ffi::Buffer<ffi::S32> page_table_XP, ffi::Buffer<ffi::S32> q_starts_X,
                  ffi::Buffer<ffi::S32> q_lens_X, ffi::RemainingArgs scales_C2KR,
                  ffi::Result<ffi::AnyBuffer> out_TNH, int64_t num_single_rows, int64_t tile,
                  float scale, int64_t window, float soft_cap) {
  const auto q = q_TNH.dimensions(), kv = kv_C2KRH.dimensions();
  const int64_t X = q_lens_X.element_count();
  if (q.size() != 3 || kv.size() != 5 || kv[4] != q[2] || q[1] % kv[2] || num_single_rows > X ||
      num_single_rows + (X - num_single_rows) * tile != q[0] || q_starts_X.element_count() != X ||
      page_table_XP.dimensions().size() != 2 || page_table_XP.dimensions()[0] != X) {
    return ffi::Error::InvalidArgument("the sizes of the queries, their rows and the pool do not fit");
  }
  if (kv_C2KRH.element_type() != kStored<KV>) {
    return ffi::Error::InvalidArgument(
        "the pool is of another dtype than this function's name says; call the one of its dtype");
  }
  const float* scales = nullptr;
  if constexpr (kHasScales<KV>) {
    const auto given = scales_C2KR.get<ffi::Buffer<ffi::F32>>(0);
    if (!given.has_value() || given->element_count() * kv[4] != kv_C2KRH.element_count()) {
      return ffi::Error::InvalidArgument("a pool of one byte wants a float32 scale for each head");
    }
    scales = given->typed_data();
  }
  if (scales_C2KR.size() != kHasScales<KV>) {
    return ffi::Error::InvalidArgument("scales belong to a pool of one byte, and only to that");
  }
  const Call call{.scales_C2KR = scales,
                  .page_table_XP = page_table_XP.typed_data(),
                  .q_starts_X = q_starts_X.typed_data(),
                  .q_lens_X = q_lens_X.typed_data(),
                  .X = X,
                  .N = q[1],
                  .H = q[2],
                  .C = kv[0],
                  .K = kv[2],
                  .R = kv[3],
                  .P = page_table_XP.dimensions()[1],
                  .num_single_rows = num_single_rows,
                  .tile = tile,
                  .scale = scale,
                  .window = window,
                  .soft_cap = soft_cap};
  if (call.H % kLanes || call.H > kMaxHeadDim) {
    return ffi::Error::InvalidArgument("the head size is no multiple of 16, or above 512");
  }
  const ffi::DataType q_type = q_TNH.element_type();
  if (q_type != ffi::F32 && q_type != ffi::BF16) {
    return ffi::Error::InvalidArgument("the queries are neither float32 nor bfloat16");
  }
  const Arrays arrays{.are_queries_float = q_type == ffi::F32,
                      .q_TNH = q_TNH.untyped_data(),
                      .kv_C2KRH = kv_C2KRH.untyped_data(),
                      .out_TNH = out_TNH->untyped_data()};
  attend_pool<KV>(call, arrays);
  return ffi::Error::Success();
}

inline auto bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("num_single_rows")
      .Attr<int64_t>("tile")
      .Attr<float>("scale")
      .Attr<int64_t>("window")
      .Attr<float>("soft_cap");
}

}  // namespace jaxserve::attention
