// Drawing tokens from a target's distribution, along the branch of a tree that the draws agree
// with.
//
// bf16 has 65,536 values, so a row's logits are counted by value: top-k and top-p then walk the
// values from the top, equal logits together, and nothing is sorted.
#include "simd.h"

#include <vector>

namespace {

constexpr int64_t kValues = 1 << 16;

// Orders bf16 numbers as unsigned integers; both zeros are one value.
uint32_t key_of(bf16 value) {
    if (value == 0x8000) value = 0;
    return value & 0x8000 ? 0xFFFFu ^ value : value | 0x8000u;
}

float value_of(uint32_t key) {
    return widen(static_cast<bf16>(key & 0x8000 ? key & 0x7FFF : 0xFFFFu ^ key));
}

// Philox 4x32-10 as in philox.py: a number in [0, 1) with 24 random bits.
double uniform(uint64_t seed, uint64_t position) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                           0, 0};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * counter[0],
                       second = uint64_t{0xCD9E8D57} * counter[2];
        const uint32_t next[4] = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0],
                                  static_cast<uint32_t>(second),
                                  static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1],
                                  static_cast<uint32_t>(first)};
        std::memcpy(counter, next, sizeof counter);
        key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
    }
    return (counter[0] >> 8) * 0x1p-24;
}

struct Settings {
    float temperature, top_p;
    int64_t top_k;  // 0: no limit
};

// One token from `size` logits; -1 where one is NaN.
int64_t draw(const bf16* logits, int64_t size, const Settings& settings, double number) {
    static thread_local std::vector<int32_t> counts;
    static thread_local std::vector<float>
        weights;  // of each kept value, in units of the largest's
    counts.assign(kValues, 0), weights.resize(kValues);
    int64_t most = -1, highest = 0;
    for (int64_t i = 0; i < size; ++i) {
        if ((logits[i] & 0x7FFF) > 0x7F80) return -1;
        const int64_t key = key_of(logits[i]);
        ++counts[key];
        if (most < 0 || key > highest) most = i, highest = key;
    }
    if (settings.temperature == 0) return most;

    const float largest = value_of(highest), scale = 1 / std::max(settings.temperature, 1e-6f);
    const int64_t limit = settings.top_k > 0 ? std::min(settings.top_k, size) : size;
    int64_t least = highest;  // the lowest value that is kept
    double total = 0;
    for (int64_t key = highest, held = 0; held < limit; --key) {
        if (!counts[key]) continue;
        weights[key] = key == highest ? 1.0f : std::exp((value_of(key) - largest) * scale);
        total += static_cast<double>(counts[key]) * weights[key];
        held += counts[key], least = key;
    }
    if (settings.top_p < 1) {
        const double wanted = settings.top_p * total;
        double before = 0;
        int64_t key = highest;
        for (; key >= least && before < wanted; --key)
            before += static_cast<double>(counts[key]) * (counts[key] ? weights[key] : 0);
        least = std::max(least, key + 1), total = before;
    }

    const double threshold = number * total;
    double mass = 0;
    int64_t last = most;
    for (int64_t i = 0; i < size; ++i) {
        const int64_t key = key_of(logits[i]);
        if (key < least || weights[key] == 0) continue;
        mass += weights[key], last = i;
        if (mass > threshold) break;
    }
    return last;
}

}  // namespace

// Trees [rows, nodes] with logits [rows, nodes, size] → the target's choice at every node of the
// walk, -1 elsewhere and where a logit is NaN. positions [rows, nodes] is where a drawn token will
// stand.
extern "C" void eagle3_sample(const bf16* logits, const int64_t* tokens, const int64_t* parents,
                              const int64_t* positions, const float* temperature,
                              const float* top_p, const int64_t* top_k, const int64_t* seeds,
                              int64_t* predicted, int64_t rows, int64_t nodes, int64_t size,
                              int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(threads) if (rows > 1 && rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * nodes;
        std::fill_n(predicted + at, nodes, -1);
        const Settings settings{temperature[row], top_p[row], top_k[row]};
        for (int64_t node = 0, next = 0; next >= 0;) {
            const int64_t token = draw(logits + (at + node) * size, size, settings,
                                       uniform(seeds[row], positions[at + node]));
            predicted[at + node] = token;
            next = -1;
            for (int64_t child = 1; child < nodes && next < 0 && token >= 0; ++child)
                if (parents[at + child] == node && tokens[at + child] == token) next = child;
            node = next;
        }
    }
}
