// Sixteen float32 numbers at a time, on every level of config/isa.py.
//
// `F16` is one AVX-512 register or two of AVX2. Its operations do the same to each lane and add
// lanes up in the same order on every level, so that what is computed with them has the same bits
// on all. Activations (`Act`) are float32, or bf16 that is widened when it is loaded and rounded
// once when it is stored.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using bf16 = uint16_t;

#ifdef EAGLE3_FLOAT32
using Act = float;
#else
using Act = bf16;
#endif

// What products of activations are made of: pairs of bf16 where an instruction multiplies them and
// adds them up in float32, float32 elsewhere.
#if defined(__AVX512BF16__) && !defined(EAGLE3_FLOAT32)
#define EAGLE3_DOTS
using Element = uint32_t;
constexpr bool kDots = true;
#else
using Element = float;
constexpr bool kDots = false;
#endif

constexpr int64_t kLanes = 16;
constexpr float kLog2e = 1.44269504f;

#ifdef __AVX512F__

struct F16 {
    __m512 v;
};

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, F16 x) { _mm512_storeu_ps(to, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a · b + c
inline F16 fms(F16 a, F16 b, F16 c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }  // a · b - c
// With a NaN, max and min are their second operand.
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 nearest(F16 x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^x for whole x in [-126, 127].
inline F16 power_of_two(F16 x) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
// One bit a lane.
inline uint32_t greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t nans(F16 x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q); }

inline __m256 low_half(F16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(F16 x) { return _mm512_extractf32x8_ps(x.v, 1); }

inline F16 load(const bf16* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

#ifdef __AVX512BF16__
inline __m256i narrow(F16 x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
#else
// To nearest, ties to even; a NaN stays one.
inline __m256i narrow(F16 x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, nans(x), _mm512_set1_epi32(0x7FC00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
#endif
inline void store(bf16* to, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
}

// Words of two bf16 numbers each: the first of every pair, and the second.
struct Pairs {
    __m512i words;
};
inline Pairs load_pairs(const uint32_t* from) { return {_mm512_loadu_si512(from)}; }
inline F16 first(Pairs p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(p.words, 16))}; }
inline F16 second(Pairs p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(p.words, _mm512_set1_epi32(0xFFFF0000)))};
}

#else  // AVX2

struct F16 {
    __m256 a, b;
};

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, F16 x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F16 fms(F16 x, F16 y, F16 z) {
    return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 nearest(F16 x) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
inline __m256 power_of_two(__m256 x) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline F16 power_of_two(F16 x) { return {power_of_two(x.a), power_of_two(x.b)}; }
template <int Kind>
uint32_t compared(F16 x, F16 y) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, Kind)) |
           _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, Kind)) << 8;
}
inline uint32_t greater(F16 x, F16 y) { return compared<_CMP_GT_OQ>(x, y); }
inline uint32_t equal(F16 x, F16 y) { return compared<_CMP_EQ_OQ>(x, y); }
inline uint32_t nans(F16 x) { return compared<_CMP_UNORD_Q>(x, x); }

inline __m256 low_half(F16 x) { return x.a; }
inline __m256 high_half(F16 x) { return x.b; }

inline __m256 widen(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F16 load(const bf16* from) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    return {widen(_mm_loadu_si128(at)), widen(_mm_loadu_si128(at + 1))};
}
inline __m256i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC00000), nan), 16);
}
inline void store(bf16* to, F16 x) {
    const __m256i mixed = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xD8));
}

struct Pairs {
    __m256i a, b;
};
inline Pairs load_pairs(const uint32_t* from) {
    const __m256i* at = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline F16 first(Pairs p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(p.a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(p.b, 16))};
}
inline F16 second(Pairs p) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF0000);
    return {_mm256_castsi256_ps(_mm256_and_si256(p.a, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(p.b, mask))};
}

#endif

#ifdef __AVX512F__

// Sixteen rows of sixteen dwords, turned.
inline void transpose(__m512i (&rows)[16]) {
    __m512i half[16];
    for (int i = 0; i < 16; i += 2) {
        half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // rows[i + c]: columns c, 4 + c, 8 + c, 12 + c of rows i … i + 3
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        const __m512i top_even = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88),
                      top_odd = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xDD);
        const __m512i low_even = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88),
                      low_odd = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xDD);
        half[c] = _mm512_shuffle_i32x4(top_even, low_even, 0x88);
        half[4 + c] = _mm512_shuffle_i32x4(top_odd, low_odd, 0x88);
        half[8 + c] = _mm512_shuffle_i32x4(top_even, low_even, 0xDD);
        half[12 + c] = _mm512_shuffle_i32x4(top_odd, low_odd, 0xDD);
    }
    std::memcpy(rows, half, sizeof half);
}

// rows[i][j] → to[j · 16 + i]
inline void store_transposed(float* to, const F16 (&rows)[16]) {
    __m512i turned[16];
    for (int i = 0; i < 16; ++i) turned[i] = _mm512_castps_si512(rows[i].v);
    transpose(turned);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 16, turned[i]);
}

#else

// Eight rows of eight floats, turned, to rows of sixteen.
inline void store_transposed(float* to, __m256 a, __m256 b, __m256 c, __m256 d, __m256 e, __m256 f,
                             __m256 g, __m256 h) {
    const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    const __m256 AB = _mm256_unpackhi_ps(a, b), CD = _mm256_unpackhi_ps(c, d);
    const __m256 ef = _mm256_unpacklo_ps(e, f), gh = _mm256_unpacklo_ps(g, h);
    const __m256 EF = _mm256_unpackhi_ps(e, f), GH = _mm256_unpackhi_ps(g, h);
    // Columns i and 4 + i of the first four rows, and of the last four.
    const __m256 top[4] = {_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE),
                           _mm256_shuffle_ps(AB, CD, 0x44), _mm256_shuffle_ps(AB, CD, 0xEE)};
    const __m256 low[4] = {_mm256_shuffle_ps(ef, gh, 0x44), _mm256_shuffle_ps(ef, gh, 0xEE),
                           _mm256_shuffle_ps(EF, GH, 0x44), _mm256_shuffle_ps(EF, GH, 0xEE)};
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * 16, _mm256_permute2f128_ps(top[i], low[i], 0x20));
        _mm256_storeu_ps(to + (4 + i) * 16, _mm256_permute2f128_ps(top[i], low[i], 0x31));
    }
}

// rows[i][j] → to[j · 16 + i]
inline void store_transposed(float* to, const F16 (&rows)[16]) {
    for (int i = 0; i < 16; i += 8) {
        const F16* r = rows + i;
        store_transposed(to + i, r[0].a, r[1].a, r[2].a, r[3].a, r[4].a, r[5].a, r[6].a, r[7].a);
        store_transposed(to + 128 + i, r[0].b, r[1].b, r[2].b, r[3].b, r[4].b, r[5].b, r[6].b,
                         r[7].b);
    }
}

#endif

// The end of an array may lie inside a vector: `count` lanes are real, the others read as zero.
template <class T>
F16 load(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
void store(T* to, F16 x, int64_t count) {
    if (count >= kLanes) return store(to, x);
    T padded[kLanes];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
inline float widen(float x) { return x; }

// What a number is after it was stored as an activation.
template <class T>
F16 as_stored(F16 x) {
    if constexpr (sizeof(T) == 4) return x;
    T stored[kLanes];
    store(stored, x);
    return load(stored);
}

// Lanes 0 … 7 and 8 … 15, then fours, twos, ones.
inline float sum(F16 x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(F16 x) {
    const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// 2^x to about 2e-7, exactly 1 at 0; NaN stays NaN, large and small x go to infinity and zero.
// The Taylor series of 2^f up to f^6: |f| is at most 1/2.
inline F16 exp2(F16 x) {
    x = min(all(252), max(all(-252), x));  // a NaN is the second operand, and stays
    const F16 whole = nearest(x), f = x - whole;
    F16 y = fma(all(1.540353e-4f), f, all(1.3333558e-3f));
    y = fma(y, f, all(9.6181291e-3f));
    y = fma(y, f, all(5.5504109e-2f));
    y = fma(y, f, all(2.4022651e-1f));
    y = fma(y, f, all(6.9314718e-1f));
    y = fma(y, f, all(1.0f));
    const F16 half = nearest(whole * all(0.5f));  // 2^whole may not be a float, two factors are
    return y * power_of_two(half) * power_of_two(whole - half);
}
