// The operations that a whole layer is made of; each is described where it is defined.
#pragma once

#include "simd.h"

extern "C" {
void eagle3_linear(const bf16* x, const uint32_t* weight, const bf16* bias, bf16* y, int64_t rows,
                   int64_t in, int64_t out, int64_t threads);
void eagle3_add_rms_norm(const bf16* x, const bf16* update, const bf16* weight, bf16* normed,
                         bf16* sum, float eps, int64_t rows, int64_t size, int64_t threads);
void eagle3_silu_mul(const bf16* gate_up, bf16* y, int64_t rows, int64_t size, int64_t threads);
void eagle3_rope_write(const bf16* qkv, const bf16* query_norm, const bf16* key_norm,
                       const bf16* cos, const bf16* sin, const int64_t* positions,
                       const int64_t* slots, bf16* keys, bf16* values, bf16* query, float eps,
                       int64_t tokens, int64_t heads, int64_t groups, int64_t page, int64_t size,
                       int64_t threads);
void eagle3_tree_attention(const bf16* query, const bf16* keys, const bf16* values,
                           const int64_t* block_table, const int64_t* seq_lens, const int64_t* mask,
                           bf16* mixed, const int64_t* sizes, int64_t threads);
}
