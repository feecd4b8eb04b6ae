// What attention reads of a call: its arrays, and a block's keys and values, made float32 or pairs of
// bfloat16 and laid out as they are multiplied.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"

namespace jaxserve::attention {

constexpr int64_t kBlock = 32;  // keys at once: K and V of a block of 64-wide heads fill 16 KB
constexpr int64_t kGroups = kBlock / kLanes;
constexpr int64_t kMaxHeadDim = 512;

// A number of one byte stands for itself times a scale.
template <typename KV>
constexpr bool kHasScales = sizeof(KV) == 1;

// What a number that `load` gives is multiplied with, beside its scale.
template <typename KV>
constexpr float kUnit = std::is_same_v<KV, Float8> ? kFloat8Unit : 1;

// What a call is given; shapes as in api.py.
struct Call {
  const float* scales_C2KR;  // of a pool that has them
  const int32_t* page_table_XP;
  const int32_t* q_starts_X;
  const int32_t* q_lens_X;
  int64_t X, N, H, C, K, R, P;
  int64_t num_single_rows, tile;
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none

  // A row's queries, its first one's position, and the pool page that it has for a page of keys: all
  // within what there is, whatever is given.
  int64_t num_queries_of(int64_t x) const {
    return std::clamp<int64_t>(q_lens_X[x], 0, room_of(x));
  }
  int64_t start_of(int64_t x) const {
    return std::clamp<int64_t>(q_starts_X[x], 0, std::max<int64_t>(0, P * R - num_queries_of(x)));
  }
  int64_t pool_page_of(int64_t x, int64_t page) const {
    return std::clamp<int64_t>(page_table_XP[x * P + std::min(page, P - 1)], 0, C - 1);
  }

  // Queries that there is room for, and the first of them.
  int64_t room_of(int64_t x) const { return x < num_single_rows ? 1 : tile; }
  int64_t first_of(int64_t x) const {
    return x < num_single_rows ? x : num_single_rows + (x - num_single_rows) * tile;
  }
};

// A thread's own memory; a query is a head's token, with its softmax so far.
struct Scratch {
  alignas(64) float keys_HS[kMaxHeadDim * kBlock];  // transposed: a number of all keys side by side
  alignas(64) float values_SH[kBlock * kMaxHeadDim];
  alignas(64) float scales_S[kBlock];  // of a head's keys, then of its values
  std::vector<float> q_MH, sum_MH, weights_MS, top_M, total_M;
};

// Where a block's keys and values of the first head are, row by row, and their scales.
template <typename KV>
struct Rows {
  int64_t num_keys = 0;
  const KV* keys[kBlock];
  const KV* values[kBlock];
  const float* key_scales[kBlock];
  const float* value_scales[kBlock];
};

// The rows of the block to come, head by head, which are fetched line by line while this one is
// computed: all at once they would stand in each other's way.
template <typename KV>
class Ahead {
 public:
  Ahead(const KV* const* rows, int64_t num_rows, int64_t H, int64_t num_heads, int64_t slab)
      : rows_(rows), num_rows_(num_rows), H_(H), slab_(slab), end_(num_rows ? num_heads * slab : 0) {}

  // Fetches the lines of as many bytes as are read meanwhile.
  template <size_t num_bytes>
  void fetch_bytes() {
    for (size_t line = 0; line < std::max<size_t>(1, num_bytes / 64); ++line) fetch_line();
  }

 private:
  void fetch_line() {
    if (offset_ == end_) return;
    __builtin_prefetch(rows_[row_] + offset_ + h_, 0, 2);
    h_ += 64 / sizeof(KV);
    while (h_ >= H_) {
      // A row that goes on where this one ends may be in the same line.
      const KV* end = rows_[row_] + H_;
      h_ -= H_;
      if (++row_ == num_rows_) {
        row_ = h_ = 0;
        offset_ += slab_;
      } else if (rows_[row_] != end) {
        h_ = 0;
      }
    }
  }

  const KV* const* rows_;
  int64_t num_rows_, H_, slab_, end_, row_ = 0, offset_ = 0, h_ = 0;
};

// Sixteen numbers of sixteen keys, transposed.
template <typename KV>
void read_tile(const KV* const keys[kLanes], int64_t num_keys, float* to) {
  Lanes tile[kLanes];
#pragma GCC unroll 16
  for (int64_t s = 0; s < kLanes; ++s) tile[s] = s < num_keys ? load(keys[s]) : Lanes{};
  transpose(tile);
#pragma GCC unroll 16
  for (int64_t h = 0; h < kLanes; ++h) store(to + h * kBlock, tile[h]);
}

// Thirty-two, two of a key side by side as one word.
template <bool is_paired, typename KV>
void read_wide_tile(const KV* const keys[kLanes], int64_t num_keys, float* to) {
  Lanes tile[kLanes];
#pragma GCC unroll 16
  for (int64_t s = 0; s < kLanes; ++s) tile[s] = s < num_keys ? load_pairs(keys[s]) : Lanes{};
  transpose(tile);
#pragma GCC unroll 16
  for (int64_t h = 0; h < kLanes; ++h) {
    if constexpr (is_paired) {
      store(to + h * kBlock, tile[h]);
    } else {
      const WordLanes pair = (WordLanes)tile[h];
      store(to + 2 * h * kBlock, (Lanes)(pair << 16));
      store(to + (2 * h + 1) * kBlock, (Lanes)(pair & 0xffff0000));
    }
  }
}

#ifdef __AVX512VBMI__
// Sixty-four of one byte, four of a key as one word: they are widened when they are transposed.
template <typename KV>
void read_quad_tile(const KV* const keys[kLanes], int64_t num_keys, float* to) {
  Lanes tile[kLanes];
#pragma GCC unroll 16
  for (int64_t s = 0; s < kLanes; ++s) {
    tile[s] = Lanes{};
    if (s < num_keys) std::memcpy(&tile[s], keys[s], sizeof tile[s]);
  }
  transpose(tile);
#pragma GCC unroll 16
  for (int64_t h = 0; h < kLanes; ++h) {
    Lanes first, last;
    widen<KV>(tile[h], first, last);
    store(to + 2 * h * kBlock, first);
    store(to + (2 * h + 1) * kBlock, last);
  }
}
#endif

template <bool is_paired, typename KV>
void read_keys(const Rows<KV>& rows, int64_t offset, int64_t H, Scratch& scratch) {
  for (int64_t group = 0; group < kBlock; group += kLanes) {
    const int64_t num_keys = std::clamp<int64_t>(rows.num_keys - group, 0, kLanes);
    const KV* keys[kLanes];
    const auto at = [&](int64_t h) {
      for (int64_t s = 0; s < num_keys; ++s) keys[s] = rows.keys[group + s] + offset + h;
      return scratch.keys_HS + (is_paired ? h / 2 : h) * kBlock + group;
    };
    int64_t h = 0;
#ifdef __AVX512VBMI__
    if constexpr (is_paired && sizeof(KV) == 1) {
      for (; h + 4 * kLanes <= H; h += 4 * kLanes) {
        float* to = at(h);
        read_quad_tile(keys, num_keys, to);
      }
    }
#endif
    if constexpr (!std::is_same_v<KV, float>) {
      for (; h + 2 * kLanes <= H; h += 2 * kLanes) {
        float* to = at(h);
        read_wide_tile<is_paired>(keys, num_keys, to);
      }
    }
    for (; h < H; h += kLanes) {
      float* to = at(h);
      read_tile(keys, num_keys, to);
    }
  }
}

template <typename KV>
void read_values(const Rows<KV>& rows, int64_t offset, int64_t H, Scratch& scratch) {
  for (int64_t s = 0; s < rows.num_keys; ++s) {
    for (int64_t h = 0; h < H; h += kLanes) {
      store(scratch.values_SH + s * H + h, load(rows.values[s] + offset + h));
    }
  }
}

// Fetches the lines of a row's scales, head by head: those of the rows after it are in them.
inline void fetch_scales(const Call& call, const float* key_scales, int64_t num_heads) {
  for (int64_t k = 0; k < num_heads; ++k) {
    __builtin_prefetch(key_scales + k * call.R);
    __builtin_prefetch(key_scales + (call.K + k) * call.R);
  }
}

// Copies the scales of a head's rows; past the last one may stand anything.
template <typename KV>
void read_scales(const float* const scales[kBlock], int64_t num_keys, int64_t offset,
                 Scratch& scratch) {
  for (int64_t s = 0; s < num_keys; ++s) scratch.scales_S[s] = kUnit<KV> * scales[s][offset];
}

}  // namespace jaxserve::attention
