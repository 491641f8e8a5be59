// Sixteen bf16 numbers at a time, computed on as float32.
//
// Every helper takes a mask of live lanes where an array can end inside a vector; dead lanes read
// as zero.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using bf16 = uint16_t;

constexpr int64_t kLanes = 16;
constexpr float kLog2e = 1.44269504f;
constexpr __mmask16 kAll = 0xFFFF;

// The lanes of a vector starting at `at` that lie below `size`.
inline __mmask16 lanes(int64_t at, int64_t size) {
    return size - at >= kLanes ? kAll : static_cast<__mmask16>((1u << (size - at)) - 1);
}

inline __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512 load(const bf16* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512 load(const bf16* from, __mmask16 live) {
    return live == kAll ? load(from) : widen(_mm256_maskz_loadu_epi16(live, from));
}

// Masked stores are slow on some processors, so only the end of an array gets one.
inline void store(bf16* to, __mmask16 live, __m256i half) {
    if (live == kAll) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
    else _mm256_mask_storeu_epi16(to, live, half);
}

inline __m256i narrow(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }

inline void store(bf16* to, __mmask16 live, __m512 value) { store(to, live, narrow(value)); }

inline float widen(bf16 value) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(value) << 16)));
}

// acc + pairwise products of bf16 numbers, lane by lane: two of each per lane.
inline __m512 dot(__m512 acc, __m512i left, __m512i right) {
    return _mm512_dpbf16_ps(acc, (__m512bh)left, (__m512bh)right);
}

// Two neighbouring bf16 numbers in every lane.
inline __m512i broadcast_pair(const void* from) {
    int pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

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

// 2^x to about 2e-7, exactly 1 at 0; NaN stays NaN, large and small x go to infinity and zero.
// The Taylor series of 2^f up to f^6: |f| is at most 1/2.
inline __m512 exp2(__m512 x) {
    // Operand order matters: with a NaN, max and min return their second operand.
    x = _mm512_min_ps(_mm512_set1_ps(1e4f), _mm512_max_ps(_mm512_set1_ps(-1e4f), x));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.540353e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}
