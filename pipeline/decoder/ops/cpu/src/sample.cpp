// Drawing tokens from a target's distribution, along the branch of a tree that the draws agree
// with: the largest of scaled logits and Gumbel noise, as in draws.py and philox.py.
//
// The noise of one token is dear (two logarithms), but it is bounded by cheap numbers: with v of
// philox.py, -log(-log(1 - v)) < -log(v), so a token can only win where v < exp(x - best). Noise is
// made for the few that pass, and the loops over all tokens are left to the compiler's vectors.
#include "simd.h"

#include <functional>
#include <vector>

namespace {

constexpr int64_t kBlock = 256;  // tokens that are looked at together
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Candidates for top-k and top-p are at most this far below the largest; the first that suffices.
constexpr float kNear[] = {6, 12, kInfinity};

struct Settings {
    float temperature, top_p;
    int64_t top_k;  // 0: no limit
    uint64_t seed, position;
};

// Orders floats as integers: NaN above infinity, both zeros alike.
int32_t image_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = x == 0 ? 0 : bits;
    return x != x ? std::numeric_limits<int32_t>::max() : bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// e^x to 2e-7 for x up to 0, zero below -87; in steps that vectorise.
float exponential(float x) {
    const float t = std::max(x, -87.0f) * kLog2e;
    const int32_t whole = static_cast<int32_t>(t - 0.5f);
    const float f = t - static_cast<float>(whole);
    float y = 1.540353e-4f;  // the Taylor series of 2^f: |f| is at most 1/2
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    const int32_t bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : y * power;
}

// Philox 4x32-10 of Groups groups of four tokens, whose numbers are counter[2]: their words.
template <int64_t Groups>
void philox(uint64_t seed, uint64_t position, uint32_t (&counter)[4][Groups]) {
    for (int64_t i = 0; i < Groups; ++i) {
        counter[0][i] = static_cast<uint32_t>(position);
        counter[1][i] = static_cast<uint32_t>(position >> 32);
        counter[3][i] = 0;
    }
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int64_t i = 0; i < Groups; ++i) {
            const uint64_t one = uint64_t{0xD2511F53} * counter[0][i],
                           two = uint64_t{0xCD9E8D57} * counter[2][i];
            counter[0][i] = static_cast<uint32_t>(two >> 32) ^ counter[1][i] ^ low;
            counter[1][i] = static_cast<uint32_t>(two);
            counter[2][i] = static_cast<uint32_t>(one >> 32) ^ counter[3][i] ^ high;
            counter[3][i] = static_cast<uint32_t>(one);
        }
        low += 0x9E3779B9, high += 0xBB67AE85;
    }
}

// The words of kBlock tokens from `first` on.
void random_words(const Settings& settings, int64_t first, uint32_t* words) {
    uint32_t counter[4][kBlock / 4];
    for (int64_t i = 0; i < kBlock / 4; ++i) counter[2][i] = static_cast<uint32_t>(first / 4 + i);
    philox(settings.seed, settings.position, counter);
    for (int64_t i = 0; i < kBlock; ++i) words[i] = counter[i % 4][i / 4];
}

float uniform(uint32_t word) { return (static_cast<float>(word) + 0.5f) * 0x1p-32f; }

float gumbel(uint32_t word) {
    return -std::log(-std::log1p(-std::min(uniform(word), 1 - 0x1p-24f)));
}

// Not below exp(x), and above it by 6 % at most, for x up to 0: between powers of two a line.
float at_least_exp(float x) {
    const float scaled = std::max(x * kLog2e, -126.0f) + 127;
    const int32_t bits = static_cast<int32_t>(scaled * (1 << 23)) + 1024;
    float bound;
    std::memcpy(&bound, &bits, sizeof bound);
    return bound;
}

double mass_of(const float* first, const float* last, float peak) {
    double mass = 0;
#pragma omp simd reduction(+ : mass)
    for (const float* at = first; at < last; ++at) mass += exponential(*at - peak);
    return mass;
}

// The lowest of the values above which all of them weigh less than `target_mass`; at least the
// largest.
// Quickselect: the part that cannot hold it is dropped, and nothing is sorted. Changes their order.
float nucleus(std::vector<float>& values, float peak, double target_mass) {
    float *first = values.data(), *last = first + values.size(), least = peak;
    double above = 0;  // the mass of what is known to be kept
    while (first != last) {
        const float pivot = first[(last - first) / 2];
        float* equal = std::partition(first, last, [=](float x) { return x > pivot; });
        const double heavier = above + mass_of(first, equal, peak);
        if (heavier >= target_mass) {
            last = equal;
            continue;
        }
        float* less = std::partition(equal, last, [=](float x) { return x == pivot; });
        above = heavier + mass_of(equal, less, peak), first = less, least = pivot;
    }
    return least;
}

// The least of the scaled logits that top-k, then top-p keep.
float threshold(const std::vector<float>& scaled, const Settings& settings, float peak) {
    static thread_local std::vector<float> near;
    const int64_t size = scaled.size(), limit = std::min(settings.top_k, size);  // 0: no limit
    double target_mass = settings.top_p * mass_of(scaled.data(), scaled.data() + size, peak);
    for (const float distance : kNear) {
        near.resize(size + 1);
        int64_t count = 0;
        const float floor = peak - distance;
        for (const float x : scaled) near[count] = x, count += x >= floor;
        near.resize(count);
        if (limit ? count >= limit : mass_of(&near[0], &near[count], peak) >= target_mass) break;
    }
    float least = -kInfinity;
    if (limit) {
        std::nth_element(near.begin(), near.begin() + limit - 1, near.end(), std::greater<>());
        least = near[limit - 1];
        near.erase(std::partition(near.begin(), near.end(), [=](float x) { return x >= least; }),
                   near.end());
        target_mass = settings.top_p * mass_of(near.data(), near.data() + near.size(), peak);
    }
    return settings.top_p < 1 ? nucleus(near, peak, target_mass) : least;
}

// One token from `size` logits; -1 where one is NaN.
int64_t draw(const Act* logits, int64_t size, const Settings& settings) {
    static thread_local std::vector<float> scaled;
    int32_t highest = std::numeric_limits<int32_t>::min();
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < size; ++i) highest = std::max(highest, image_of(widen(logits[i])));
    if (highest == std::numeric_limits<int32_t>::max()) return -1;
    int64_t token = 0;
    while (image_of(widen(logits[token])) != highest) ++token;
    const float largest = widen(logits[token]);
    if (settings.temperature == 0 || !std::isfinite(largest)) return token;

    const float scale = std::max(settings.temperature, 1e-6f), peak = largest / scale;
    scaled.resize(size);
    for (int64_t i = 0; i < size; ++i) scaled[i] = widen(logits[i]) / scale;
    const bool cut = settings.top_k > 0 || settings.top_p < 1;
    const float least = cut ? threshold(scaled, settings, peak) : -kInfinity;
    uint32_t words[kBlock];
    float best = -kInfinity, chance[kBlock];
    const auto consider = [&](int64_t i, uint32_t word) {
        const float noisy = scaled[i] + gumbel(word);
        if (noisy > best || (noisy == best && i < token)) best = noisy, token = i;
    };
    const int64_t beginning = token / kBlock * kBlock;
    random_words(settings, beginning, words);
    consider(token, words[token - beginning]);  // a high bar for the others
    for (int64_t start = 0; start < size; start += kBlock) {
        const int64_t count = std::min(kBlock, size - start);
        const float* x = &scaled[start];
        float high = -kInfinity;
#pragma omp simd reduction(max : high)
        for (int64_t i = 0; i < count; ++i) high = std::max(high, x[i]);
        // The largest noise is 22.88; sums are rounded, in units of the larger number.
        const float slack = 1e-4f + std::abs(best) * 0x1p-21f, bar = best - slack;
        if (high < least || high + 23 < bar) continue;
        random_words(settings, start, words);
        for (int64_t i = 0; i < count; ++i)
            chance[i] = at_least_exp(std::min(x[i] - bar, 0.0f)) - uniform(words[i]);
        for (int64_t i = 0; i < count; ++i)
            if (chance[i] >= 0 && x[i] >= least && x[i] > -kInfinity)
                consider(start + i, words[i]);
    }
    return token;
}

}  // namespace

// Trees [rows, nodes] with logits [rows, nodes, size] → the target's choice at every node of the
// walk, -1 elsewhere and where a logit is NaN. positions [rows, nodes] is where a drawn token will
// stand.
extern "C" void eagle3_sample(const Act* logits, const int64_t* tokens, const int64_t* parents,
                              const int64_t* positions, const float* temperature,
                              const float* top_p, const int64_t* top_k, const int64_t* seeds,
                              int64_t* predicted, int64_t rows, int64_t nodes, int64_t size,
                              int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(threads) if (rows > 1 && rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * nodes;
        std::fill_n(predicted + at, nodes, -1);
        for (int64_t node = 0, next = 0; next >= 0;) {
            const Settings settings{temperature[row], top_p[row], top_k[row],
                                    static_cast<uint64_t>(seeds[row]),
                                    static_cast<uint64_t>(positions[at + node])};
            const int64_t token = draw(logits + (at + node) * size, size, settings);
            predicted[at + node] = token;
            next = -1;
            for (int64_t child = 1; child < nodes && next < 0 && token >= 0; ++child)
                if (parents[at + child] == node && tokens[at + child] == token) next = child;
            node = next;
        }
    }
}

// Logits of `drafts` drafts for each of `rows` rows, [rows · drafts, size], with `weight` times the
// noise of the tokens `target_ids`, or with null of all; see perturb_drafts of base.py. Tokens stand `depth`
// after `positions` [rows].
extern "C" void eagle3_perturb_drafts(const Act* logits, Act* noisy, const int64_t* target_ids,
                                      const float* temperature, const int64_t* seeds,
                                      const int64_t* positions, float weight, int64_t depth,
                                      int64_t rows, int64_t drafts, int64_t size,
                                      int64_t threads) {
    const int64_t blocks = (size + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 12)
    for (int64_t at = 0; at < rows * blocks; ++at) {
        const int64_t row = at / blocks, start = at % blocks * kBlock;
        const int64_t count = std::min(kBlock, size - start), first = row * drafts * size + start;
        if (temperature[row] == 0) {
            for (int64_t from = first, i = 0; i < drafts; ++i, from += size)
                std::copy_n(logits + from, count, noisy + from);
            continue;
        }
        const F16 inverse = all(1 / std::max(temperature[row], 1e-6f));
        uint32_t counter[4][kBlock];
        int64_t token[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) {
            const int64_t in = std::min(start + i, size - 1);
            token[i] = target_ids ? target_ids[in] : in;
            counter[2][i] = static_cast<uint32_t>(token[i] / 4);
        }
        philox(seeds[row], positions[row] + depth, counter);
        float noise[kBlock] = {};
        for (int64_t i = 0; i < count; ++i) noise[i] = weight * gumbel(counter[token[i] % 4][i]);
        for (int64_t from = first, draft = 0; draft < drafts; ++draft, from += size)
            for (int64_t i = 0; i < count; i += kLanes) {
                const F16 scaled = load(logits + from + i, count - i) * inverse;
                store(noisy + from + i, scaled + load(noise + i), count - i);
            }
    }
}
