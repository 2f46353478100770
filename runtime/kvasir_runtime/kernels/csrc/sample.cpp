// Draws a token after each position of a step (sample.py). One pass over a position's logits finds the largest of each
// chunk, and from these follows which chunks can hold what top_k, top_p and min_p keep: only a draw from the whole row,
// or the nucleus of a flat one, looks at every logit again. The logits stay as they are.

#include <algorithm>
#include <cfloat>
#include <vector>

#include "team.h"
#include "vec.h"

using namespace kvasir;

// Of all rows; the first axis is the row.
struct SamplingTensors {
    const float *inverse_temperature, *top_p, *log_min_p;  // a greedy row's inverse temperature is 0
    const float *presence_penalty, *frequency_penalty, *repetition_penalty;
    const int32_t *top_k, *min_tokens;
    const int64_t *seeds, *num_stop_ids, *stop_ids, *num_biases, *bias_ids;
    const float* biases;
    const int32_t *token_ids, *num_prompt_tokens, *drafts;
    int64_t max_stop_ids, max_biases, max_tokens, max_drafts;
};

// Of all positions. Bit t % 32 of the word t / 32 says whether token t is allowed; no mask allows all.
struct Positions {
    const int64_t *rows, *after, *num_earlier;
    const uint32_t* mask;
    int64_t mask_stride;
};

namespace {

constexpr int CHUNK = 256;
constexpr float UNIT = 0x1p40f;    // weights are summed up as integers, so that the order does not show
constexpr float NO_WEIGHT = -28;   // e^-28 is less than one unit
constexpr int NUM_LIKELY = 128;    // chunks whose largest logits tell where a nucleus is looked for at first
constexpr int DIGIT = 8;           // bits of a key
constexpr int NUM_ROUNDS = 10;

// Philox4x32-10 of the counter (position, 0) under the key `seed`: 48 of its bits as a number in [0, 1).
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < NUM_ROUNDS; round++) {
        uint64_t product0 = uint64_t(c0) * 0xD2511F53u, product1 = uint64_t(c2) * 0xCD9E8D57u;
        uint32_t old_c1 = c1, old_c3 = c3;
        c0 = uint32_t(product1 >> 32) ^ old_c1 ^ k0;
        c1 = uint32_t(product1);
        c2 = uint32_t(product0 >> 32) ^ old_c3 ^ k1;
        c3 = uint32_t(product0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return double((uint64_t(c0) << 16) | (c1 >> 16)) * 0x1p-48;
}

// A logit that a penalty, a bias or min_tokens changes.
struct Change {
    int32_t token, count;  // count: occurrences in the output
    float logit;
};

// Of a thread.
struct Scratch {
    std::vector<int32_t> places;  // of each token, its place among the changes and one; 0 between positions
    std::vector<Change> changes, sorted_changes;
    std::vector<int32_t> first_changes;  // of each chunk, then their number
    std::vector<float> maxima, likely;
    std::vector<int64_t> sums;  // of each chunk's weights
    std::vector<int32_t> tokens;
    std::vector<uint32_t> keys;
    std::vector<int64_t> weights;
};

thread_local Scratch own_scratch;

// NaN is never drawn, and infinity is the largest number.
inline vfloat without_nan(vfloat x) {
    x = maximum(x, splat(-INFINITY));
    return x > splat(FLT_MAX) ? splat(FLT_MAX) : x;
}

// Of the tokens with these scaled logits.
inline int64_t sum_of_weights(vfloat scaled) {
    const vfloat units = exponential(scaled) * UNIT;
#if defined(__AVX512DQ__)
    const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256((__m512)units));
    const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps((__m512)units, 1));
    return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
#else
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += int64_t(units[i]);
    return total;
#endif
}

template <typename T>
class Sampler {
   public:
    Sampler(const T* logits, int64_t vocab, const SamplingTensors& tensors, const Positions& positions, int64_t index)
        : logits_(logits),
          vocab_(vocab),
          chunks_((vocab + CHUNK - 1) / CHUNK),
          t_(tensors),
          row_(positions.rows[index]),
          after_(positions.after[index]),
          mask_(positions.mask ? positions.mask + index * positions.mask_stride : nullptr),
          scratch_(own_scratch) {
        collect_changes(positions.num_earlier[index]);
    }

    int64_t draw() {
        find_maxima();
        if (max_ == -INFINITY) return 0;
        inverse_temperature_ = t_.inverse_temperature[row_];
        if (inverse_temperature_ == 0) return first_of_largest();
        const double number = uniform(uint64_t(t_.seeds[row_]), uint64_t(after_ + 1));
        const bool has_top_k = t_.top_k[row_] < vocab_, has_top_p = t_.top_p[row_] < 1;
        const float least = t_.log_min_p[row_];
        for (float& maximum : scratch_.maxima) maximum = (maximum - max_) * inverse_temperature_;
        if (has_top_k || least > NO_WEIGHT) {
            collect(std::max({least, NO_WEIGHT, has_top_k ? likely_maximum(t_.top_k[row_]) : -INFINITY}));
            if (has_top_k) keep_top_k();
            weigh();
            if (has_top_p) keep_top_p(total_of_weights());
            return look_up(number);
        }
        const int64_t total = sum_chunks();
        if (!has_top_p) return look_up_in_chunks(number, total);
        collect(std::max(NO_WEIGHT, likely_maximum(NUM_LIKELY)));
        weigh();
        if (total_of_weights() < wanted_of(total)) {
            collect(NO_WEIGHT);
            weigh();
        }
        keep_top_p(total);
        return look_up(number);
    }

   private:
    Change& change(int64_t token) {
        int32_t& place = scratch_.places[token];
        if (place == 0) {
            vfloat logit = without_nan(splat(widen(logits_[token])));
            if (mask_ && !(mask_[token / 32] >> token % 32 & 1)) logit = splat(-INFINITY);
            scratch_.changes.push_back({int32_t(token), 0, logit[0]});
            place = int32_t(scratch_.changes.size());
        }
        return scratch_.changes[place - 1];
    }

    void collect_changes(int64_t num_earlier) {
        scratch_.changes.clear();
        if (int64_t(scratch_.places.size()) < vocab_) scratch_.places.resize(vocab_);
        penalise(num_earlier);
        for (int64_t i = 0; i < t_.num_biases[row_]; i++)
            change(t_.bias_ids[row_ * t_.max_biases + i]).logit += t_.biases[row_ * t_.max_biases + i];
        if (after_ + 1 - t_.num_prompt_tokens[row_] < t_.min_tokens[row_])
            for (int64_t i = 0; i < t_.num_stop_ids[row_]; i++)
                change(t_.stop_ids[row_ * t_.max_stop_ids + i]).logit = -INFINITY;
        sort_changes();
    }

    // Repetition scales what prompt or output hold, once; presence and frequency are subtracted for the output's.
    void penalise(int64_t num_earlier) {
        const float presence = t_.presence_penalty[row_], frequency = t_.frequency_penalty[row_];
        const float repetition = t_.repetition_penalty[row_];
        if (presence == 0 && frequency == 0 && repetition == 1) return;
        const int32_t* known = t_.token_ids + row_ * t_.max_tokens;
        const int64_t num_known = after_ + 1 - num_earlier, num_prompt = t_.num_prompt_tokens[row_];
        if (repetition != 1)
            for (int64_t i = 0; i < std::min(num_prompt, num_known); i++) change(known[i]);
        for (int64_t i = num_prompt; i < num_known; i++) change(known[i]).count++;
        const int32_t* drafts = t_.drafts + row_ * t_.max_drafts;
        for (int64_t i = 0; i < num_earlier && drafts[i] >= 0; i++) change(drafts[i]).count++;
        for (Change& own : scratch_.changes) {
            own.logit = own.logit > 0 ? own.logit / repetition : own.logit * repetition;
            if (own.count) own.logit -= presence;
            volatile float subtracted = float(own.count) * frequency;  // rounded, as torch does it
            own.logit = std::min(own.logit - subtracted, FLT_MAX);
        }
    }

    // By chunks; within one the order does not matter.
    void sort_changes() {
        has_changes_ = !scratch_.changes.empty();
        if (!has_changes_) return;
        std::vector<int32_t>& first = scratch_.first_changes;
        first.assign(chunks_ + 2, 0);
        for (const Change& own : scratch_.changes) first[own.token / CHUNK + 2]++;
        for (int64_t chunk = 0; chunk < chunks_; chunk++) first[chunk + 2] += first[chunk + 1];
        scratch_.sorted_changes.resize(scratch_.changes.size());
        for (const Change& own : scratch_.changes) {
            scratch_.sorted_changes[first[own.token / CHUNK + 1]++] = own;
            scratch_.places[own.token] = 0;
        }
    }

    // The chunk's logits as they are drawn from, -inf behind the last.
    void read(int64_t chunk, float* out) const {
        const int64_t begin = chunk * CHUNK, count = std::min<int64_t>(CHUNK, vocab_ - begin);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(out + i, without_nan(load(logits_ + begin + i)));
        for (; i < count; i++) out[i] = without_nan(splat(widen(logits_[begin + i])))[0];
        std::fill(out + count, out + CHUNK, -INFINITY);
        if (mask_) {
            for (i = 0; i < count; i += 32) {
                const uint32_t allowed = mask_[(begin + i) / 32];
                if (allowed == ~0u) continue;
                for (int64_t bit = 0; bit < 32; bit++) out[i + bit] = allowed >> bit & 1 ? out[i + bit] : -INFINITY;
            }
        }
        if (has_changes_) {
            for (int32_t at = scratch_.first_changes[chunk]; at < scratch_.first_changes[chunk + 1]; at++)
                out[scratch_.sorted_changes[at].token - begin] = scratch_.sorted_changes[at].logit;
        }
    }

    void find_maxima() {
        scratch_.maxima.resize(chunks_);
        max_ = -INFINITY;
        alignas(64) float logits[CHUNK];
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            read(chunk, logits);
            vfloat best[2] = {splat(-INFINITY), splat(-INFINITY)};
            for (int i = 0; i < CHUNK; i += 2 * LANES) {
                best[0] = maximum(load(logits + i), best[0]);
                best[1] = maximum(load(logits + i + LANES), best[1]);
            }
            scratch_.maxima[chunk] = largest(maximum(best[0], best[1]));
            max_ = std::max(max_, scratch_.maxima[chunk]);
        }
    }

    int64_t first_of_largest() const {
        const int64_t chunk = std::find(scratch_.maxima.begin(), scratch_.maxima.end(), max_) - scratch_.maxima.begin();
        alignas(64) float logits[CHUNK];
        read(chunk, logits);
        return chunk * CHUNK + (std::find(logits, logits + CHUNK, max_) - logits);
    }

    // As many tokens are at least this likely.
    float likely_maximum(int64_t count) const {
        if (count > chunks_) return -INFINITY;
        scratch_.likely = scratch_.maxima;
        std::nth_element(scratch_.likely.begin(), scratch_.likely.begin() + count - 1, scratch_.likely.end(),
                         std::greater<float>());
        return scratch_.likely[count - 1];
    }

    // The tokens whose scaled logits are at least `least`, in their order, with keys that grow as they fall.
    void collect(float least) {
        count_ = 0;
        alignas(64) float scaled[CHUNK];
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            if (scratch_.maxima[chunk] < least) continue;
            read_scaled(chunk, scaled);
            if (int64_t(scratch_.tokens.size()) < count_ + CHUNK) {
                scratch_.tokens.resize(2 * (count_ + CHUNK));
                scratch_.keys.resize(2 * (count_ + CHUNK));
            }
            int32_t* tokens = scratch_.tokens.data();
            uint32_t* keys = scratch_.keys.data();
            for (int i = 0; i < CHUNK; i++) {
                uint32_t bits;
                memcpy(&bits, scaled + i, sizeof(bits));
                tokens[count_] = int32_t(chunk * CHUNK + i);
                keys[count_] = bits & 0x7fffffff;
                count_ += scaled[i] >= least;
            }
        }
    }

    void read_scaled(int64_t chunk, float* out) const {
        read(chunk, out);
        for (int i = 0; i < CHUNK; i += LANES) store(out + i, (load(out + i) - max_) * inverse_temperature_);
    }

    void keep_top_k() {
        if (count_ <= t_.top_k[row_]) return;
        keep(cut([](int64_t) { return int64_t(1); }, t_.top_k[row_]));
    }

    void keep_top_p(int64_t total) {
        const int64_t* weights = scratch_.weights.data();
        const uint32_t least_likely = cut([=](int64_t i) { return weights[i]; }, wanted_of(total));
        for (int64_t i = 0; i < count_; i++)
            if (scratch_.keys[i] > least_likely) scratch_.weights[i] = 0;
    }

    int64_t wanted_of(int64_t total) const {
        return std::max<int64_t>(1, int64_t(std::ceil(double(total) * double(t_.top_p[row_]))));
    }

    // The largest key before which, in their order, there is less than is wanted. Bits are found from the upper ones.
    template <typename Amount>
    uint32_t cut(const Amount& amount, int64_t wanted) const {
        const uint32_t* keys = scratch_.keys.data();
        uint64_t prefix = 0;
        for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
            int64_t bins[1 << DIGIT] = {};
            for (int64_t i = 0; i < count_; i++)
                if (uint64_t(keys[i]) >> shift >> DIGIT == prefix) bins[keys[i] >> shift & 255] += amount(i);
            uint32_t digit = 0;
            while (digit < 255 && bins[digit] < wanted) wanted -= bins[digit++];
            prefix = prefix << DIGIT | digit;
        }
        return uint32_t(prefix);
    }

    void keep(uint32_t largest_key) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count_; i++) {
            scratch_.tokens[kept] = scratch_.tokens[i];
            scratch_.keys[kept] = scratch_.keys[i];
            kept += scratch_.keys[i] <= largest_key;
        }
        count_ = kept;
    }

    void weigh() {
        scratch_.weights.resize(scratch_.keys.size());
        for (int64_t i = 0; i < count_; i += LANES) {
            const int count = int(std::min<int64_t>(LANES, count_ - i));
            vuint keys{};
            memcpy(&keys, scratch_.keys.data() + i, count * sizeof(uint32_t));
            const vfloat units = exponential((vfloat)(keys | 0x80000000u)) * UNIT;
            for (int lane = 0; lane < count; lane++) scratch_.weights[i + lane] = int64_t(units[lane]);
        }
    }

    int64_t total_of_weights() const {
        int64_t total = 0;
        for (int64_t i = 0; i < count_; i++) total += scratch_.weights[i];
        return total;
    }

    int64_t look_up(double number) const {
        int64_t upto = total_of_weights(), target = std::min(int64_t(number * double(upto)), upto - 1);
        int64_t i = 0;
        while (target >= scratch_.weights[i]) target -= scratch_.weights[i++];
        return scratch_.tokens[i];
    }

    int64_t sum_chunks() {
        scratch_.sums.assign(chunks_, 0);
        int64_t total = 0;
        alignas(64) float scaled[CHUNK];
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            if (scratch_.maxima[chunk] < NO_WEIGHT) continue;
            read_scaled(chunk, scaled);
            for (int i = 0; i < CHUNK; i += LANES) scratch_.sums[chunk] += sum_of_weights(load(scaled + i));
            total += scratch_.sums[chunk];
        }
        return total;
    }

    int64_t look_up_in_chunks(double number, int64_t total) const {
        int64_t target = std::min(int64_t(number * double(total)), total - 1), chunk = 0;
        while (target >= scratch_.sums[chunk]) target -= scratch_.sums[chunk++];
        alignas(64) float scaled[CHUNK];
        read_scaled(chunk, scaled);
        for (int i = 0; i < CHUNK; i += LANES) store(scaled + i, exponential(load(scaled + i)) * UNIT);
        int i = 0;
        while (target >= int64_t(scaled[i])) target -= int64_t(scaled[i++]);
        return chunk * CHUNK + i;
    }

    const T* logits_;
    int64_t vocab_, chunks_;
    const SamplingTensors& t_;
    int64_t row_, after_;
    const uint32_t* mask_;
    Scratch& scratch_;
    bool has_changes_ = false;
    float max_ = 0, inverse_temperature_ = 0;
    int64_t count_ = 0;  // of the tokens collected
};

}  // namespace

extern "C" void kvasir_sample(int dtype, const void* logits, int64_t stride, int64_t count, int64_t vocab,
                              const Positions* positions, const SamplingTensors* tensors, int64_t* out) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for(count, true, [&](int64_t i) {
            out[i] = Sampler<T>((const T*)logits + i * stride, vocab, *tensors, *positions, i).draw();
        });
    });
}
