// What a step needs around the decoder: its tokens from the rows (prepare_inputs.py), and which drafts hold
// (verify_drafts.py). One thread: even a full step is a few thousand numbers.

#include <algorithm>
#include <cstdint>

namespace {

// Tokens of a decode that can be computed: its last known one and the planned drafts up to the first missing.
int32_t num_present(const int32_t* drafts, int32_t planned) {
    int32_t present = 1;
    while (present < planned && drafts[present - 1] >= 0) present++;
    return present;
}

}  // namespace

extern "C" {

void kvasir_prepare_inputs(const int32_t* token_ids, int64_t token_stride, const int32_t* num_computed,
                           const int32_t* drafts, int64_t max_drafts, const int32_t* block_tables, int64_t num_groups,
                           int64_t num_rows, int64_t max_blocks, const int32_t* rows, const int32_t* planned_starts,
                           int64_t num_requests, int64_t num_decodes, int64_t block_size, int64_t* out_token_ids,
                           int64_t* out_positions, int64_t* out_slots, int64_t slot_stride, int32_t* out_query_starts,
                           int32_t* out_seq_lens) {
    int64_t token = 0;
    for (int64_t i = 0; i < num_requests; i++) {
        int64_t row = rows[i], first = num_computed[row];
        int32_t length = planned_starts[i + 1] - planned_starts[i];
        const int32_t* guesses = drafts + row * max_drafts;
        bool is_decode = i < num_decodes;
        if (is_decode) length = num_present(guesses, length);
        out_query_starts[i] = int32_t(token);
        out_seq_lens[i] = int32_t(first + length);
        for (int32_t j = 0; j < length; j++, token++) {
            int64_t position = first + j;
            out_token_ids[token] = is_decode && j > 0 ? guesses[j - 1] : token_ids[row * token_stride + position];
            out_positions[token] = position;
            for (int64_t g = 0; g < num_groups; g++) {
                int64_t block = block_tables[(g * num_rows + row) * max_blocks + position / block_size];
                out_slots[g * slot_stride + token] = block * block_size + position % block_size;
            }
        }
    }
    out_query_starts[num_requests] = int32_t(token);
}

void kvasir_verify_drafts(const int64_t* drawn, const int64_t* positions, const int32_t* starts, const int32_t* rows,
                          const bool* draws, int64_t num_sampled, int64_t width, int32_t* token_ids,
                          int64_t token_stride, int32_t* num_known, int32_t* num_computed, const int32_t* drafts,
                          int64_t max_drafts, int32_t* out_token_ids, int32_t* out_num_accepted,
                          int32_t* out_num_drafts) {
    for (int64_t i = 0; i < num_sampled; i++) {
        int64_t row = rows[i], base = positions[starts[i]];
        int32_t count = starts[i + 1] - starts[i];
        const int32_t* guesses = drafts + row * max_drafts;
        int32_t num_drafts = num_present(guesses, count) - 1, num_accepted = draws[i] ? 1 : 0;
        for (int32_t j = 0; j < width; j++) {
            int32_t token = int32_t(drawn[starts[i] + std::min(j, count - 1)]);
            out_token_ids[i * width + j] = token;
            if (j < count) token_ids[row * token_stride + base + 1 + j] = token;
            if (num_accepted == j + 1 && j < num_drafts && guesses[j] == token) num_accepted++;
        }
        num_known[row] = int32_t(base) + num_accepted + 1;
        num_computed[row] = int32_t(base) + std::max(num_accepted, 1);
        out_num_accepted[i] = num_accepted;
        out_num_drafts[i] = num_drafts;
    }
}

}  // extern "C"
