// A mixture of experts around its products: which experts a token goes to, its pairs with them sorted by expert, and the
// weighted sum of what they made of it.

#include <algorithm>

#include "replay.h"
#include "team.h"
#include "vec.h"

using namespace kvasir;

namespace {

constexpr int64_t PARALLEL_FROM = 32 * 1024;  // numbers; below, waking a thread costs more than it saves

// The top_k largest logits, largest first and of equals the first, in `weights`; whose they are in `experts`.
template <typename T>
inline void select_row(const T* logits, int64_t num_experts, int64_t top_k, float* weights, int32_t* experts) {
    for (int64_t k = 0; k < top_k; k++) {
        weights[k] = -INFINITY;
        experts[k] = int32_t(k);  // logits that are no numbers are never selected: an expert must be named all the same
    }
    for (int64_t expert = 0; expert < num_experts; expert++) {
        const float logit = widen(logits[expert]);
        if (!(logit > weights[top_k - 1])) continue;
        int64_t place = top_k - 1;
        for (; place > 0 && logit > weights[place - 1]; place--) {
            weights[place] = weights[place - 1];
            experts[place] = experts[place - 1];
        }
        weights[place] = logit;
        experts[place] = int32_t(expert);
    }
}

template <typename T>
inline float sum_of_exponentials(const T* logits, int64_t count, float largest) {
    vfloat sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += exponential(load(logits + i) - largest);
    float total = sum(sums);
    for (; i < count; i++) total += std::exp(widen(logits[i]) - largest);
    return total;
}

template <typename T>
void route(const T* logits, int64_t stride, int64_t rows, int64_t num_experts, int64_t top_k, bool renormalises,
           float* weights, int32_t* experts) {
    parallel_for(rows, rows * num_experts > PARALLEL_FROM, [&](int64_t row) {
        float* selected = weights + row * top_k;
        select_row(logits + row * stride, num_experts, top_k, selected, experts + row * top_k);
        const float largest = selected[0];
        const float total = renormalises ? sum_of_exponentials(selected, top_k, largest)
                                         : sum_of_exponentials(logits + row * stride, num_experts, largest);
        for (int64_t k = 0; k < top_k; k++) selected[k] = std::exp(selected[k] - largest) / total;
    });
}

// Experts `first` to `first + count` are here.
struct Local {
    int64_t first, count;
    bool holds(int32_t expert) const { return uint64_t(expert - first) < uint64_t(count); }
};

template <typename T>
void combine(const T* outputs, const float* weights, const int32_t* experts, Local local, T* out, int64_t tokens,
             int64_t top_k, int64_t width) {
    parallel_for(tokens, tokens * top_k * width > PARALLEL_FROM, [&](int64_t token) {
        const int64_t first = token * top_k;
        for (int64_t i = 0; i < width; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, width - i));
            vfloat total = {};
            for (int64_t pair = first; pair < first + top_k; pair++)
                if (local.holds(experts[pair])) total += load(outputs + pair * width + i, n) * weights[pair];
            store(out + token * width + i, total, n);
        }
    });
}

}  // namespace

extern "C" {

// logits [rows][num_experts], `stride` numbers apart; weights and experts [rows][top_k].
void kvasir_route(int dtype, const void* logits, int64_t stride, int64_t rows, int64_t num_experts, int64_t top_k,
                  int renormalises, float* weights, int32_t* experts) {
    with_type(dtype, [&](auto type) {
        route((const decltype(type)*)logits, stride, rows, num_experts, top_k, renormalises != 0, weights, experts);
    });
}

// Sorts the numbers of the pairs whose experts are here by expert, keeping their order; `ends` [count] is where each
// expert's end.
void kvasir_group_by_expert(const int32_t* experts, int64_t num_pairs, int64_t first, int64_t count, int32_t* pairs,
                            int32_t* ends) {
    const Local local{first, count};
    std::fill(ends, ends + count, 0);
    for (int64_t pair = 0; pair < num_pairs; pair++)
        if (local.holds(experts[pair])) ends[experts[pair] - first]++;
    int32_t start = 0;
    for (int64_t expert = 0; expert < count; expert++) {
        const int32_t size = ends[expert];
        ends[expert] = start;  // until the pairs are in their places: where the next one goes
        start += size;
    }
    for (int64_t pair = 0; pair < num_pairs; pair++)
        if (local.holds(experts[pair])) pairs[ends[experts[pair] - first]++] = int32_t(pair);
}

// outputs [tokens * top_k][width]; those of experts elsewhere are not read.
void kvasir_combine_experts(int dtype, const void* outputs, const float* weights, const int32_t* experts, int64_t first,
                            int64_t count, void* out, int64_t tokens, int64_t top_k, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        combine((const T*)outputs, weights, experts, Local{first, count}, (T*)out, tokens, top_k, width);
    });
}

}  // extern "C"

KVASIR_REPLAYABLE(kvasir_route)
KVASIR_REPLAYABLE(kvasir_group_by_expert)
KVASIR_REPLAYABLE(kvasir_combine_experts)
