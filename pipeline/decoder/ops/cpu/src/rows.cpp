// What happens to each token by itself: norms, activation, rotation. Sums and products in float32.
#include "kernels.h"

namespace {

constexpr int64_t kSerialWork = 1 << 13;  // numbers below which a second thread does not pay

float inverse_rms(const Act* x, int64_t size, float eps) {
    F16 squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const F16 v = load(x + i, size - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// x / sqrt(mean(x²) + eps) · weight
void norm(const Act* x, const float* weight, Act* to, int64_t size, float eps) {
    const F16 inverse = all(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += kLanes)
        store(to + i, load(x + i, size - i) * inverse * load(weight + i, size - i), size - i);
}

// Rotation of one head (RoFormer, eq. 34), half-split, after an optional RMS norm:
//
//     to[i]        = x[i] · cos[i]               − x[i + half] · sin[i]
//     to[i + half] = x[i + half] · cos[i + half] + x[i] · sin[i + half]
void rotate(const Act* x, const float* weight, float eps, const Act* cos, const Act* sin, Act* to,
            int64_t size) {
    const int64_t half = size / 2;
    const F16 inverse = all(weight ? inverse_rms(x, size, eps) : 1.0f);
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t live = half - i;
        F16 low = load(x + i, live), high = load(x + i + half, live);
        if (weight) {
            low = low * inverse * load(weight + i, live);
            high = high * inverse * load(weight + i + half, live);
        }
        store(to + i, fms(low, load(cos + i, live), high * load(sin + i, live)), live);
        store(to + i + half,
              fma(high, load(cos + i + half, live), low * load(sin + i + half, live)), live);
    }
}

}  // namespace

extern "C" {

// sum = x + update, rounded; normed = its RMS norm · weight. All [rows, size]. Without an update
// (null) x is the sum, and `sum` is not written. With an `update_norm` the update becomes its own
// norm first.
void eagle3_add_rms_norm(const Act* x, Act* update, const float* update_norm, const float* weight,
                         Act* normed, Act* sum, float eps, int64_t rows, int64_t size,
                         int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSerialWork)
    for (int64_t at = 0; at < rows * size; at += size) {
        if (update && update_norm) norm(update + at, update_norm, update + at, size, eps);
        if (update)
            for (int64_t i = 0; i < size; i += kLanes)
                store(sum + at + i, load(x + at + i, size - i) + load(update + at + i, size - i),
                      size - i);
        norm(update ? sum + at : x + at, weight, normed + at, size, eps);
    }
}

// The input of an EAGLE-3 head, to [rows, 2 size]: the norm of each token's embedding, then that
// of its hidden state [rows, size]. Returns `kInside`, or the first token that is outside
// the `vocabulary` of the embedding: rows from there on are not written.
int64_t eagle3_embed_concat(const int64_t* tokens, const Act* embedding, const Act* hidden,
                            const float* embed_norm, const float* hidden_norm, Act* to, float eps,
                            int64_t rows, int64_t size, int64_t vocabulary) {
    for (int64_t row = 0; row < rows; ++row, to += 2 * size) {
        if (tokens[row] < 0 || tokens[row] >= vocabulary) return tokens[row];
        norm(embedding + tokens[row] * size, embed_norm, to, size, eps);
        norm(hidden + row * size, hidden_norm, to + size, size, eps);
    }
    return kInside;
}

// gate_up [rows, 2 size] → y [rows, size]: gate / (1 + e^-z) · up, with z = gate for SiLU, and for
// GELU's tanh approximation (Hendrycks & Gimpel 2016) z = √(8/π) · (gate + 0.044715 gate³).
void eagle3_gate_mul(const Act* gate_up, Act* y, int64_t gelu, int64_t rows, int64_t size,
                     int64_t threads) {
    const F16 scale = all(gelu ? -1.5957691216057308f * kLog2e : -kLog2e);
#pragma omp parallel for num_threads(threads) if (rows * size > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        const Act* from = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += kLanes) {
            const F16 gate = load(from + i, size - i), up = load(from + size + i, size - i);
            const F16 z = gelu ? fma(gate * gate * gate, all(0.044715f), gate) : gate;
            store(y + row * size + i, gate / (all(1.0f) + exp2(z * scale)) * up, size - i);
        }
    }
}

// Cache entries and slots [tokens] of tokens that are `within` [tokens] entries after the seq_lens
// of their rows, which have `pages` pages each.
void eagle3_compute_slot_mapping(const int64_t* block_table, const int64_t* seq_lens,
                                 const int64_t* row, const int64_t* within, int64_t* entries,
                                 int64_t* slot_mapping, int64_t tokens, int64_t pages) {
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t entry = entries[token] = seq_lens[row[token]] + within[token];
        const int64_t page = block_table[row[token] * pages + entry / kPage];
        slot_mapping[token] = page * kPage + entry % kPage;
    }
}

// qkv [tokens, heads + 2 groups, size]: rotated queries to `query` [tokens, heads, size], rotated
// keys and values to their slots of the planes [pages, groups, kPage, size]. Norm weights [size]
// may both be null.
void eagle3_rope_write(const Act* qkv, const float* query_norm, const float* key_norm,
                       const Metadata* metadata, Act* keys, Act* values, Act* query, float eps,
                       int64_t heads, int64_t groups, int64_t size, int64_t threads) {
    const Metadata& m = *metadata;
#pragma omp parallel for num_threads(threads) if (m.tokens * (heads + groups) * size > kSerialWork)
    for (int64_t token = 0; token < m.tokens; ++token) {
        const Act* from = qkv + token * (heads + 2 * groups) * size;
        const Act *cos = m.cos + m.positions[token] * size, *sin = m.sin + m.positions[token] * size;
        for (int64_t head = 0; head < heads; ++head, from += size)
            rotate(from, query_norm, eps, cos, sin, query + (token * heads + head) * size, size);
        const int64_t slot = m.slot_mapping[token];
        const int64_t entry = (slot / kPage * groups * kPage + slot % kPage) * size;
        for (int64_t group = 0; group < groups; ++group, from += size) {
            const int64_t to = entry + group * kPage * size;
            rotate(from, key_norm, eps, cos, sin, keys + to, size);
            std::memcpy(values + to, from + groups * size, size * sizeof(Act));
        }
    }
}

}  // extern "C"
