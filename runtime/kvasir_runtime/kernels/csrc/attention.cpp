// Paged attention for batches that mix prefill chunks and decodes, with the online softmax of FlashAttention
// (Dao et al. 2022) and, for few queries over many keys, the split along the keys of Flash-Decoding.
//
// The query heads that share a key head, and a request's tokens, are rows of one tile, so keys and values are read once
// for all of them; so they are for requests that share the blocks of a whole split (a common prefix), row by row with
// the same arithmetic. A plan holds the division of the work (attention_plan.h); a step's layers share it.

#include <atomic>

#include "attention_amx.h"
#include "attention_plan.h"
#include "attention_products.h"
#include "replay.h"

using namespace kvasir;

namespace {

template <typename T>
void compute_item(const Call& call, const Item& item, const Query* queries, Scratch& scratch, float* partials) {
#if KVASIR_AMX
    if (std::is_same_v<T, bf16> && call.use_amx && call.head_dim % 32 == 0) {
        for (int head = 0; head < item.kv_heads; head++) {
            Item one = item;
            one.kv_head += head;
            one.kv_heads = 1;
            attend_item_tiles(call, one, queries, scratch, partials);
        }
        return;
    }
#endif
#if KVASIR_COLUMNS
    if constexpr (std::is_same_v<T, bf16>) return attend_item_bf16(call, item, queries, scratch, partials);
#endif
    attend_item<T>(call, item, queries, scratch, partials);
}

template <typename T>
void combine_splits(const Call& call, const SplitRequest& split, const float* partials) {
    const int dim = call.head_dim;
    const int64_t rows = int64_t(split.tokens) * call.heads, step = rows * (dim + 2);
    static thread_local Scratch scratch;
    float* outputs = scratch.at_least(dim);
    for (int64_t row = 0; row < rows; row++) {
        const float* from = partials + (split.partial + row) * (dim + 2);
        float row_max = -INFINITY, row_sum = 0;
        std::fill(outputs, outputs + dim, 0.0f);
        for (int s = 0; s < split.splits; s++, from += step)
            merge_split(dim, from + 2, from[0], from[1], outputs, row_max, row_sum);
        write_row(outputs, row_sum, dim,
                  (T*)call.out + (call.query_starts[split.request] + row / call.heads) * call.out_stride +
                      row % call.heads * dim);
    }
}

template <typename T>
void attend(const Plan& plan, const Call& call) {
    static thread_local Scratch partial_scratch;
    float* partials = partial_scratch.at_least(plan.partial_rows * (call.head_dim + 2));
    const int64_t items = plan.items.size(), split_requests = plan.split_requests.size();
    const bool pays = items > 1 && plan.cost * call.group() * call.head_dim > 100000;
    std::atomic<int64_t> next{0};
    on_all_threads(pays, [&](int, int) {
        static thread_local Scratch scratch;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
            const Item& item = plan.items[i];
            compute_item<T>(call, item, &plan.queries[item.first_query], scratch, partials);
        }
    });
    parallel_for(split_requests, pays, [&](int64_t i) { combine_splits<T>(call, plan.split_requests[i], partials); });
}

}  // namespace

extern "C" {

// The arrays must outlive the plan. It is divided before it is used, and given back with kvasir_attention_free.
Plan* kvasir_attention_plan(int dtype, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* block_table,
                            int64_t table_stride, const int32_t* rows, int requests, int heads, int kv_heads,
                            int head_dim, int block_size, int window, int use_amx, int use_dot) {
    return new Plan{{dtype, query_starts, seq_lens, block_table, table_stride, rows, requests, heads, kv_heads, head_dim,
                     block_size, window, use_amx != 0, use_dot != 0}};
}

// Divides the work by what the arrays hold now.
void kvasir_attention_divide(Plan* plan) { make_plan(*plan); }

void kvasir_attention_free(Plan* plan) { delete plan; }

// One layer. Strides are counted in numbers of the plan's type.
void kvasir_attention(const Plan* plan, const void* query, int64_t query_stride, void* out, int64_t out_stride,
                      const void* key_cache, const void* value_cache, int64_t block_stride, int64_t slot_stride,
                      int64_t head_stride, float scale, float softcap) {
    const Call call{plan->step, query, query_stride, out, out_stride, key_cache, value_cache, block_stride, slot_stride,
                    head_stride, scale, softcap};
    with_type(plan->step.dtype, [&](auto type) { attend<decltype(type)>(*plan, call); });
}

}  // extern "C"

KVASIR_REPLAYABLE(kvasir_attention_divide)
KVASIR_REPLAYABLE(kvasir_attention)
