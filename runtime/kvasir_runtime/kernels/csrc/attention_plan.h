// The division of a step's attention into items. A token's numbers follow from its position alone: key tiles and splits
// lie at fixed positions, and what splits gave is merged in their order, within an item or after it. Threads, neighbours
// and the cut of a prompt into chunks decide only who computes what and when.
#pragma once

#include <map>
#include <vector>

#include "attention_call.h"
#include "team.h"

namespace kvasir {

constexpr int SPLIT_MAX_QUERY = 16;  // tokens: a decode with its drafts; longer chunks have query tiles enough

// A request whose keys are split: rows [partial, partial + splits * tokens * heads) of the partial results, by split.
struct SplitRequest {
    int request, tokens;
    int64_t partial;
    int splits;
};

struct Plan {
    Step step;
    std::vector<Item> items;
    std::vector<Query> queries;
    std::vector<SplitRequest> split_requests;
    int64_t partial_rows = 0;
    int64_t cost = 0;
};

// A request that has a whole split, and where its partial results go.
struct SplitReader {
    int request, query_len;
    int64_t partial;
};

// The readers of a split by its blocks, so that those who share a prefix read it once.
using SplitReaders = std::map<std::vector<int32_t>, std::vector<SplitReader>>;

inline int query_len_of(const Step& step, int request) {
    return step.query_starts[request + 1] - step.query_starts[request];
}

// Returns the index of the first.
inline int add_queries(Plan& plan, int request, int query_len, int64_t partial) {
    const Step& step = plan.step;
    const int first = plan.queries.size(), position = step.seq_lens[request] - query_len;
    for (int t = 0; t < query_len; t++)
        plan.queries.push_back(
            {step.query_starts[request] + t, position + t, partial < 0 ? -1 : partial + int64_t(t) * step.heads});
    return first;
}

inline void add_split(Plan& plan, const SplitReader& reader, int first_key, int end_key, int heads_each) {
    const int queries = add_queries(plan, reader.request, reader.query_len, reader.partial);
    for (int head = 0; head < plan.step.kv_heads; head += heads_each)
        plan.items.push_back({reader.request, head, std::min(heads_each, plan.step.kv_heads - head), queries,
                              reader.query_len, first_key, end_key});
}

// Few tokens over many keys: one query tile, divided along the keys. Whole splits are put aside in `readers`, by split,
// until it is known who else reads the same blocks.
inline void split_keys(Plan& plan, int request, int query_len, int heads_each, std::vector<SplitReaders>& readers) {
    const Step& step = plan.step;
    const int seq_len = step.seq_lens[request], first_key = step.first_key_seen(seq_len - query_len);
    const int first_split = first_key / SPLIT, splits = (seq_len - 1) / SPLIT - first_split + 1;
    const int64_t rows = int64_t(query_len) * step.heads, partial = splits > 1 ? plan.partial_rows : -1;
    for (int s = 0; s < splits; s++) {
        const int split = first_split + s, begin = split * SPLIT, end = begin + SPLIT;
        const SplitReader reader{request, query_len, partial < 0 ? -1 : partial + s * rows};
        if (first_key <= begin && end <= seq_len && SPLIT % step.block_size == 0) {
            const int32_t* blocks = step.blocks_of(request) + begin / step.block_size;
            if (int(readers.size()) <= split) readers.resize(split + 1);
            const std::vector<int32_t> split_blocks(blocks, blocks + SPLIT / step.block_size);
            readers[split][split_blocks].push_back(reader);
        } else {
            add_split(plan, reader, std::max(first_key, begin), std::min(seq_len, end), heads_each);
        }
    }
    if (splits > 1) {
        plan.split_requests.push_back({request, query_len, partial, splits});
        plan.partial_rows += splits * rows;
    }
}

// Tokens of a query tile, such that tiles of `tokens` in all are of even size and none is mostly empty.
inline int tile_tokens(const Step& step, int tokens) {
    const int most = std::max(1, ROWS / step.group()), tiles = (tokens + most - 1) / most;
    return (tokens + tiles - 1) / tiles;
}

// Whole splits: as many of their readers in an item as fill a query tile.
inline void add_shared_splits(Plan& plan, const std::vector<SplitReaders>& readers, int heads_each) {
    for (int split = 0; split < int(readers.size()); split++)
        for (const auto& [blocks, together] : readers[split]) {
            int all_tokens = 0, longest = 0;
            for (const SplitReader& reader : together) {
                all_tokens += reader.query_len;
                longest = std::max(longest, reader.query_len);
            }
            const int max_tokens = std::max(longest, tile_tokens(plan.step, all_tokens));
            for (size_t next = 0; next < together.size();) {
                const int begin = split * SPLIT, first_query = plan.queries.size();
                const size_t first = next;
                int tokens = 0;
                for (; next < together.size() && tokens + together[next].query_len <= max_tokens; next++)
                    tokens += together[next].query_len;
                if (next == first + 1) {
                    add_split(plan, together[first], begin, begin + SPLIT, heads_each);
                    continue;
                }
                for (size_t i = first; i < next; i++)
                    add_queries(plan, together[i].request, together[i].query_len, together[i].partial);
                for (int head = 0; head < plan.step.kv_heads; head++)
                    plan.items.push_back({together[first].request, head, 1, first_query, tokens, begin, begin + SPLIT});
            }
        }
}

inline void tile_queries(Plan& plan, int request, int query_len) {
    const Step& step = plan.step;
    const int tokens_each = tile_tokens(step, query_len);
    const int queries = add_queries(plan, request, query_len, -1);
    for (int head = 0; head < step.kv_heads; head++)
        for (int token = 0; token < query_len; token += tokens_each) {
            const int position = step.seq_lens[request] - query_len + token;
            const int tokens = std::min(tokens_each, query_len - token);
            plan.items.push_back({request, head, 1, queries + token, tokens, step.first_key_seen(position),
                                  position + tokens});
        }
}

inline void make_plan(Plan& plan) {
    plan = Plan{plan.step};
    const Step& step = plan.step;
    std::vector<SplitReaders> readers;
    const int threads = max_threads();
    // Neighbouring heads lie in the same memory pages, so one thread reads all of them unless that leaves threads idle.
    const int wanted = (3 * threads + step.requests - 1) / std::max(1, step.requests);
    const int heads_each = std::max(1, step.kv_heads / std::min(step.kv_heads, std::max(1, wanted)));
    for (int request = 0; request < step.requests; request++) {
        const int query_len = query_len_of(step, request);
        if (query_len <= 0) continue;
        if (query_len <= SPLIT_MAX_QUERY && query_len * step.group() <= ROWS)
            split_keys(plan, request, query_len, heads_each, readers);
        else
            tile_queries(plan, request, query_len);
    }
    add_shared_splits(plan, readers, heads_each);
    for (const Item& item : plan.items) plan.cost += item.cost();
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const Item& a, const Item& b) { return a.cost() > b.cost(); });
}

}  // namespace kvasir
