// paged_attention on a CPU: one item of work for a row and some KV heads, an online softmax over
// blocks of keys (Milakov & Gimelshein 2018, alg. 3; Dao et al. 2022, alg. 1). A query's numbers
// depend on nothing but its own sequence: blocks stand at fixed positions, and nothing is split.
//
// A page is read from end to end, all heads' keys and then all heads' values, where there are rows
// enough to keep all threads at work: the processor sees that coming, and fetches it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_reads.h"
#include "parallel.h"

namespace jaxserve::attention {

constexpr int64_t kItemsPerThread = 4;
constexpr float kLowest = -0.7f * std::numeric_limits<float>::max();

// Scores of `num` queries from m on: weights_MS = scale * q . k, capped.
template <int num, bool is_paired, typename KV>
void score(const Call& call, int64_t m, Ahead<KV>& ahead, Scratch& scratch) {
  Lanes sums[num][kGroups] = {};
  const int64_t len = is_paired ? call.H / 2 : call.H;
  const float* q = scratch.q_MH.data() + m * len;
  for (int64_t h = 0; h < len; ++h) {
    const float* keys = scratch.keys_HS + h * kBlock;
    const Lanes low = load(keys), high = load(keys + kLanes);
    ahead.template fetch_bytes<(is_paired ? 2 : 1) * kBlock * sizeof(KV)>();
#pragma GCC unroll 4
    for (int i = 0; i < num; ++i) {
      const float factor = q[i * len + h];
      if constexpr (is_paired) {
        const auto pair = std::bit_cast<uint32_t>(factor);
        sums[i][0] = add_pair_products(sums[i][0], low, pair);
        sums[i][1] = add_pair_products(sums[i][1], high, pair);
      } else {
        sums[i][0] += factor * low;
        sums[i][1] += factor * high;
      }
    }
  }
  for (int i = 0; i < num; ++i) {
    for (int64_t group = 0; group < kGroups; ++group) {
      Lanes scores = call.scale * sums[i][group];
      if constexpr (kHasScales<KV>) scores *= load(scratch.scales_S + group * kLanes);
      if (call.soft_cap != 0) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          scores[lane] = call.soft_cap * std::tanh(scores[lane] / call.soft_cap);
        }
      }
      store(scratch.weights_MS.data() + (m + i) * kBlock + group * kLanes, scores);
    }
  }
}

// Takes a block's scores of one query into its softmax; keys [first, last) of the block are seen.
// What is left of them are the weights of the values, which have the values' scales in them.
template <bool has_scales>
void take_scores(const Call& call, int64_t m, int64_t first, int64_t last, Scratch& scratch) {
  constexpr IntLanes kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float* weights = scratch.weights_MS.data() + m * kBlock;
  Lanes scores[kGroups];
  Lanes top = fill(kLowest);
  IntLanes is_seen[kGroups];
  for (int64_t group = 0; group < kGroups; ++group) {
    const IntLanes key = kLane + int32_t(group * kLanes);
    is_seen[group] = (key >= int32_t(first)) & (key < int32_t(last));
    scores[group] = select(is_seen[group], load(weights + group * kLanes), fill(kLowest));
    top = larger(top, scores[group]);
  }
  const float old_top = scratch.top_M[m];
  float new_top = largest_of(top);
  new_top = new_top > old_top ? new_top : old_top;
  Lanes total{};
  for (int64_t group = 0; group < kGroups; ++group) {
    // A NaN among the scores stays one: it is this sequence's own.
    const Lanes weight = select(is_seen[group], exp_of_negative(scores[group] - new_top), Lanes{});
    total += weight;
    if constexpr (has_scales) {
      store(weights + group * kLanes, weight * load(scratch.scales_S + group * kLanes));
    } else {
      store(weights + group * kLanes, weight);
    }
  }
  if (new_top != old_top) {
    const Lanes shrink = exp_of_negative(fill(old_top - new_top));
    scratch.total_M[m] *= shrink[0];
    float* sums = scratch.sum_MH.data() + m * call.H;
    for (int64_t h = 0; h < call.H; h += kLanes) store(sums + h, shrink * load(sums + h));
    scratch.top_M[m] = new_top;
  }
  scratch.total_M[m] += sum_of(total);
}

// Adds the block's values to the weighted sums of `num` queries, `width` lanes of the head at once.
template <int num, int width, typename Value, typename KV>
void add_values(const Call& call, int64_t m, int64_t num_keys, const Value* const values[kBlock],
                int64_t h, Ahead<KV>& ahead, Scratch& scratch) {
  Lanes sums[num][width];
  float* out = scratch.sum_MH.data() + m * call.H + h;
  for (int i = 0; i < num; ++i) {
    for (int j = 0; j < width; ++j) sums[i][j] = load(out + i * call.H + j * kLanes);
  }
  const float* weights = scratch.weights_MS.data() + m * kBlock;
  for (int64_t s = 0; s < num_keys; ++s) {
    Lanes value[width];
#pragma GCC unroll 4
    for (int j = 0; j < width; ++j) value[j] = load(values[s] + h + j * kLanes);
    ahead.template fetch_bytes<width * kLanes * sizeof(KV)>();
#pragma GCC unroll 4
    for (int i = 0; i < num; ++i) {
      const float weight = weights[i * kBlock + s];
#pragma GCC unroll 4
      for (int j = 0; j < width; ++j) sums[i][j] += weight * value[j];
    }
  }
  for (int i = 0; i < num; ++i) {
    for (int j = 0; j < width; ++j) store(out + i * call.H + j * kLanes, sums[i][j]);
  }
}

template <int num, typename Value, typename KV>
void add_values(const Call& call, int64_t m, int64_t num_keys, const Value* const values[kBlock],
                Ahead<KV>& ahead, Scratch& scratch) {
  int64_t h = 0;
  for (; h + 4 * kLanes <= call.H; h += 4 * kLanes) {
    add_values<num, 4>(call, m, num_keys, values, h, ahead, scratch);
  }
  for (; h < call.H; h += kLanes) add_values<num, 1>(call, m, num_keys, values, h, ahead, scratch);
}

template <typename Value, typename KV>
void add_values(const Call& call, int64_t m, int64_t end, int64_t num_keys,
                const Value* const values[kBlock], Ahead<KV>& ahead, Scratch& scratch) {
  for (; m + 4 <= end; m += 4) add_values<4>(call, m, num_keys, values, ahead, scratch);
  if (m + 3 == end) return add_values<3>(call, m, num_keys, values, ahead, scratch);
  if (m + 2 == end) return add_values<2>(call, m, num_keys, values, ahead, scratch);
  if (m + 1 == end) return add_values<1>(call, m, num_keys, values, ahead, scratch);
}

// Scores of queries [m, end), which are a head's, with a block.
template <bool is_paired, typename KV>
void score(const Call& call, int64_t m, int64_t end, Ahead<KV>& ahead, Scratch& scratch) {
  for (; m + 4 <= end; m += 4) score<4, is_paired>(call, m, ahead, scratch);
  if (m + 3 == end) return score<3, is_paired>(call, m, ahead, scratch);
  if (m + 2 == end) return score<2, is_paired>(call, m, ahead, scratch);
  if (m + 1 == end) return score<1, is_paired>(call, m, ahead, scratch);
}

// KV heads [first, first + num), each of which G = N / K query heads share.
struct Heads {
  int64_t first, num;
};

// Copies a row's queries, head by head, into the scratch.
template <typename Query, bool is_paired>
void read_queries(const Call& call, const Query* q_QNH, int64_t num_queries, Heads heads,
                  Scratch& scratch) {
  const int64_t G = call.N / call.K, len = G * call.H;
  float* to = scratch.q_MH.data();
  for (int64_t k = heads.first; k < heads.first + heads.num; ++k) {
    for (int64_t q = 0; q < num_queries; ++q) {
      const Query* from = q_QNH + (q * call.N + k * G) * call.H;
      if constexpr (is_paired) {
        std::memcpy(to, from, len * sizeof(Query));
        to += len / 2;
      } else {
        for (int64_t i = 0; i < len; i += kLanes) store(to + i, load(from + i));
        to += len;
      }
    }
  }
}

// One row of queries with some heads. Keys and queries of bfloat16 are multiplied as they come
// (is_paired), others as float32.
template <typename Query, typename KV, bool is_paired>
void attend(const Call& call, const Query* q_TNH, const KV* kv_C2KRH, Query* out_TNH, int64_t x,
            Heads heads) {
  static thread_local Scratch scratch;
  const int64_t H = call.H, G = call.N / call.K, num_queries = call.num_queries_of(x);
  const int64_t M = num_queries * G;  // of a head
  const int64_t first_query = call.first_of(x) * call.N * H;
  Query* out_QNH = out_TNH + first_query;
  for (int64_t q = num_queries; q < call.room_of(x); ++q) {
    Query* out = out_QNH + (q * call.N + heads.first * G) * H;
    std::memset((void*)out, 0, heads.num * G * H * sizeof(Query));
  }
  if (num_queries == 0) return;
  scratch.q_MH.resize(heads.num * M * H);
  scratch.weights_MS.resize(heads.num * M * kBlock);
  scratch.sum_MH.assign(heads.num * M * H, 0);
  scratch.top_M.assign(heads.num * M, kLowest);
  scratch.total_M.assign(heads.num * M, 0);
  read_queries<Query, is_paired>(call, q_TNH + first_query, num_queries, heads, scratch);
  const int64_t start = call.start_of(x), end = start + num_queries;
  const int64_t first_key = call.window ? std::max<int64_t>(0, start - call.window + 1) : 0;
  const int64_t slab = call.R * H;  // numbers of a page's K or V of one head
  const auto find_rows = [&](int64_t block, Rows<KV>& rows) {
    rows.num_keys = std::clamp<int64_t>(end - block, 0, kBlock);
    int64_t page = block / call.R, row = block % call.R;
    for (int64_t s = 0; s < rows.num_keys; ++s) {
      const int64_t pool_page = call.pool_page_of(x, page);
      const int64_t at = (pool_page * 2 * call.K + heads.first) * call.R + row;
      rows.keys[s] = kv_C2KRH + at * H;
      rows.values[s] = rows.keys[s] + call.K * slab;
      if constexpr (kHasScales<KV>) {
        rows.key_scales[s] = call.scales_C2KR + at;
        rows.value_scales[s] = rows.key_scales[s] + call.K * call.R;
        if (s % kLanes == 0 || row == 0) fetch_scales(call, rows.key_scales[s], heads.num);
      }
      if (++row == call.R) row = 0, ++page;
    }
  };
  int64_t block = first_key / kBlock * kBlock;
  Rows<KV> blocks[2];
  find_rows(block, blocks[0]);
  for (int64_t turn = 0; block < end; block += kBlock, turn = !turn) {
    const Rows<KV>& rows = blocks[turn];
    Rows<KV>& next = blocks[!turn];
    find_rows(block + kBlock, next);
    Ahead<KV> keys_ahead(next.keys, next.num_keys, H, heads.num, slab);
    for (int64_t k = 0; k < heads.num; ++k) {
      read_keys<is_paired>(rows, k * slab, H, scratch);
      if constexpr (kHasScales<KV>) {
        read_scales<KV>(rows.key_scales, rows.num_keys, k * call.R, scratch);
      }
      score<is_paired>(call, k * M, (k + 1) * M, keys_ahead, scratch);
    }
    for (int64_t m = 0; m < heads.num * M;) {
      if constexpr (kHasScales<KV>) {
        read_scales<KV>(rows.value_scales, rows.num_keys, m / M * call.R, scratch);
      }
      for (int64_t position = start; position < end; ++position) {
        const int64_t last = std::min(rows.num_keys, position + 1 - block);
        const int64_t first = call.window ? std::max<int64_t>(0, position - call.window + 1 - block) : 0;
        for (int64_t g = 0; g < G; ++g) take_scores<kHasScales<KV>>(call, m++, first, last, scratch);
      }
    }
    Ahead<KV> values_ahead(next.values, next.num_keys, H, heads.num, slab);
    for (int64_t k = 0; k < heads.num; ++k) {
      if (M <= 4) {  // converted as they are read; of more queries, once for all of them
        const KV* values[kBlock];
        for (int64_t s = 0; s < rows.num_keys; ++s) values[s] = rows.values[s] + k * slab;
        add_values(call, k * M, (k + 1) * M, rows.num_keys, values, values_ahead, scratch);
      } else {
        read_values(rows, k * slab, H, scratch);
        const float* values[kBlock];
        for (int64_t s = 0; s < rows.num_keys; ++s) values[s] = scratch.values_SH + s * H;
        add_values(call, k * M, (k + 1) * M, rows.num_keys, values, values_ahead, scratch);
      }
    }
  }
  for (int64_t m = 0; m < heads.num * M; ++m) {
    const float total = scratch.total_M[m];
    const Lanes factor = fill(total == 0 ? 0 : 1 / total);
    const int64_t k = heads.first + m / M, q = m % M / G;
    Query* out = out_QNH + (q * call.N + k * G + m % G) * H;
    for (int64_t h = 0; h < H; h += kLanes) {
      store(out + h, factor * load(scratch.sum_MH.data() + m * H + h));
    }
  }
}

// Rows [first, first + num), whose heads are cut into pieces of work where there are few rows.
struct Group {
  int64_t first, num, width, pieces_per_row;

  Group(const Call& call, int64_t first, int64_t last) : first(first), num(last - first) {
    const int64_t num_live = std::count_if(call.q_lens_X + first, call.q_lens_X + last,
                                           [](int32_t len) { return len > 0; });
    const int64_t num_wanted = kItemsPerThread * Team::get().num_threads();
    const int64_t num_splits =
        num_live ? std::min((num_wanted + num_live - 1) / num_live, call.K) : 1;
    width = (call.K + num_splits - 1) / num_splits;
    pieces_per_row = (call.K + width - 1) / width;
  }

  int64_t num_pieces() const { return num * pieces_per_row; }
};

// Tiles and rows of one query in one go, the tiles first: they take longest.
template <typename Query, typename KV, bool is_paired>
void attend_all(const Call& call, const Query* q_TNH, const KV* kv_C2KRH, Query* out_TNH) {
  const Group tiles(call, call.num_single_rows, call.X), singles(call, 0, call.num_single_rows);
  Team::get().run(tiles.num_pieces() + singles.num_pieces(), [&](int64_t piece) {
    const bool is_tile = piece < tiles.num_pieces();
    const Group& group = is_tile ? tiles : singles;
    if (!is_tile) piece -= tiles.num_pieces();
    const int64_t first = piece % group.pieces_per_row * group.width;
    attend<Query, KV, is_paired>(call, q_TNH, kv_C2KRH, out_TNH,
                                 group.first + piece / group.pieces_per_row,
                                 {first, std::min(group.width, call.K - first)});
  });
}

// What a call is about, whatever its dtypes: queries, pool, and where the result goes.
struct Arrays {
  bool are_queries_float;  // else bfloat16
  const void *q_TNH, *kv_C2KRH;
  void* out_TNH;
};

template <typename Query, typename KV>
void attend_queries(const Call& call, const Arrays& arrays) {
  const auto* q = static_cast<const Query*>(arrays.q_TNH);
  const auto* kv = static_cast<const KV*>(arrays.kv_C2KRH);
  auto* out = static_cast<Query*>(arrays.out_TNH);
  if constexpr (std::is_same_v<Query, BFloat16> && !std::is_same_v<KV, float>) {
    if (call.H % (2 * kLanes) == 0) return attend_all<Query, KV, true>(call, q, kv, out);
  }
  attend_all<Query, KV, false>(call, q, kv, out);
}

// A pool of one dtype, with queries of either.
template <typename KV>
void attend_pool(const Call& call, const Arrays& arrays) {
  arrays.are_queries_float ? attend_queries<float, KV>(call, arrays)
                           : attend_queries<BFloat16, KV>(call, arrays);
}

}  // namespace jaxserve::attention
