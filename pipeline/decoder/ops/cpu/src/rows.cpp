// What happens to each token by itself: norms, activation, rotation. Sums and products in float32.
#include "simd.h"

namespace {

constexpr int64_t kSerialWork = 1 << 13;  // numbers below which a second thread does not pay

// Rotation of one head (RoFormer, eq. 34), half-split, after an optional RMS norm:
//
//     to[i]        = x[i] · cos[i]               − x[i + half] · sin[i]
//     to[i + half] = x[i + half] · cos[i + half] + x[i] · sin[i + half]
void rotate(const bf16* x, const bf16* norm, float eps, const bf16* cos, const bf16* sin, bf16* to,
            int64_t size) {
    const int64_t half = size / 2;
    __m512 inverse = _mm512_set1_ps(1.0f);
    if (norm) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += kLanes) {
            const __m512 v = load(x + i, lanes(i, size));
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        inverse = _mm512_set1_ps(
            1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
    }
    for (int64_t i = 0; i < half; i += kLanes) {
        const __mmask16 live = lanes(i, half);
        __m512 low = load(x + i, live), high = load(x + i + half, live);
        if (norm) {
            low = _mm512_mul_ps(_mm512_mul_ps(low, inverse), load(norm + i, live));
            high = _mm512_mul_ps(_mm512_mul_ps(high, inverse), load(norm + i + half, live));
        }
        store(to + i, live,
              _mm512_fmsub_ps(low, load(cos + i, live), _mm512_mul_ps(high, load(sin + i, live))));
        store(to + i + half, live,
              _mm512_fmadd_ps(high, load(cos + i + half, live),
                              _mm512_mul_ps(low, load(sin + i + half, live))));
    }
}

}  // namespace

extern "C" {

// sum = x + update, rounded; normed = sum / sqrt(mean(sum²) + eps) · weight. All [rows, size].
// Without an update (null) x is the sum, and `sum` is not written.
void eagle3_add_rms_norm(const bf16* x, const bf16* update, const bf16* weight, bf16* normed,
                         bf16* sum, float eps, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * size;
        const bf16* total = update ? sum + at : x + at;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += kLanes) {
            const __mmask16 live = lanes(i, size);
            __m512 v = load(x + at + i, live);
            if (update) {
                const __m256i rounded = narrow(_mm512_add_ps(v, load(update + at + i, live)));
                store(sum + at + i, live, rounded);
                v = widen(rounded);
            }
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const __m512 inverse = _mm512_set1_ps(
            1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
        for (int64_t i = 0; i < size; i += kLanes) {
            const __mmask16 live = lanes(i, size);
            store(normed + at + i, live,
                  _mm512_mul_ps(_mm512_mul_ps(load(total + i, live), inverse),
                                load(weight + i, live)));
        }
    }
}

// gate_up [rows, 2 size] → y [rows, size]: silu(gate) · up.
void eagle3_silu_mul(const bf16* gate_up, bf16* y, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        const bf16* from = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += kLanes) {
            const __mmask16 live = lanes(i, size);
            const __m512 gate = load(from + i, live);
            const __m512 divisor = _mm512_add_ps(
                _mm512_set1_ps(1.0f), exp2(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2e))));
            store(y + row * size + i, live,
                  _mm512_mul_ps(_mm512_div_ps(gate, divisor), load(from + size + i, live)));
        }
    }
}

// qkv [tokens, heads + 2 groups, size]: rotated queries to `query` [tokens, heads, size], rotated
// keys and values to their slots of the planes [pages, groups, page, size]. Norm weights [size] may
// both be null.
void eagle3_rope_write(const bf16* qkv, const bf16* query_norm, const bf16* key_norm,
                       const bf16* cos, const bf16* sin, const int64_t* positions,
                       const int64_t* slots, bf16* keys, bf16* values, bf16* query, float eps,
                       int64_t tokens, int64_t heads, int64_t groups, int64_t page, int64_t size,
                       int64_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens * (heads + groups) * size > kSerialWork)
    for (int64_t token = 0; token < tokens; ++token) {
        const bf16* from = qkv + token * (heads + 2 * groups) * size;
        const bf16 *cos_row = cos + positions[token] * size,
                   *sin_row = sin + positions[token] * size;
        for (int64_t head = 0; head < heads; ++head, from += size)
            rotate(from, query_norm, eps, cos_row, sin_row, query + (token * heads + head) * size,
                   size);
        const int64_t slot = (slots[token] / page * groups * page + slots[token] % page) * size;
        for (int64_t group = 0; group < groups; ++group, from += size) {
            const int64_t to = slot + group * page * size;
            rotate(from, key_norm, eps, cos_row, sin_row, keys + to, size);
            std::memcpy(values + to, from + groups * size, size * sizeof(bf16));
        }
    }
}

}  // extern "C"
