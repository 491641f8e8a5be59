// What the operations share; each is described where it is defined.
#pragma once

#include "simd.h"

#include <limits>

constexpr int64_t kPage = 64;  // PAGE of layer.py

// What a kernel returns that reads embeddings, where every token has one; otherwise the token.
constexpr int64_t kInside = std::numeric_limits<int64_t>::min();

// Ask for line i of the `count` cache lines at `from`, into L2: in L1 the next panel of a weight
// would push out the one that is being multiplied. Lines are taken from several places in turn,
// since memory answers several streams faster than one.
template <int64_t Streams>
inline void prefetch_line(const char* from, int64_t count, int64_t i) {
    _mm_prefetch(from + (i % Streams * (count / Streams) + i / Streams) * 64, _MM_HINT_T1);
}

extern "C" {

struct Matrix {  // a packed weight, see linear.cpp
    const char* data;
    int64_t out, in, wide;  // wide: float32
};

struct Metadata {  // AttentionMetadata of layer.py
    const Act *cos, *sin;
    const int64_t *positions, *slot_mapping, *block_table, *seq_lens, *cu_seqlens_q;
    const int64_t* mask;  // or null
    const int64_t* first_seen;  // [tokens] or null: entries before it are hidden
    const Metadata* local;      // what layers with `local` read instead, or null
    int64_t rows, tokens, pages;
};

struct Layer {  // LayerWeights of layer.py; what a layer lacks is null
    const Matrix *qkv, *output, *gate_up, *down;
    const Act *qkv_bias, *output_bias;
    const float *query_norm, *key_norm, *post_norm;
    const float* norm;                        // of its output
    const float *attended_norm, *fed_norm;    // of what attention and MLP add
    int64_t heads, groups, size, gelu, local;
    int64_t captured;  // where its output goes among the captured ones, or -1
};

void eagle3_linear(const Act* x, const Matrix* matrix, const Act* bias, Act* y, int64_t rows,
                   int64_t threads, const Matrix* next);
void eagle3_add_rms_norm(const Act* x, Act* update, const float* update_norm, const float* weight,
                         Act* normed, Act* sum, float eps, int64_t rows, int64_t size,
                         int64_t threads);
void eagle3_gate_mul(const Act* gate_up, Act* y, int64_t gelu, int64_t rows, int64_t size,
                     int64_t threads);
void eagle3_rope_write(const Act* qkv, const float* query_norm, const float* key_norm,
                       const Metadata* metadata, Act* keys, Act* values, Act* query, float eps,
                       int64_t heads, int64_t groups, int64_t size, int64_t threads);
void eagle3_tree_attention(const Act* query, const Act* keys, const Act* values,
                           const Metadata* metadata, Act* mixed, int64_t heads, int64_t groups,
                           int64_t size, int64_t threads);
void eagle3_layers(const Layer* layers, int64_t count, const Metadata* metadata, const Act* normed,
                   Act* hidden, Act* output_normed, Act* planes, int64_t side, Act* aux,
                   int64_t captures, float eps, int64_t threads);
int64_t eagle3_embed_concat(const int64_t* tokens, const Act* embedding, const Act* hidden,
                            const float* embed_norm, const float* hidden_norm, Act* to, float eps,
                            int64_t rows, int64_t size, int64_t vocabulary);
void eagle3_propose(const Act* logits, float* score, int64_t* index, int64_t k, int64_t rows,
                    int64_t size, int64_t threads);
void eagle3_perturb_drafts(const Act* logits, Act* noisy, const int64_t* target_ids,
                           const float* weights, const int64_t* seeds, const int64_t* positions,
                           int64_t depth, int64_t rows, int64_t drafts, int64_t size,
                           int64_t threads);
void eagle3_select_beams(const float* score, const float* gained, const int64_t* proposed,
                         const int64_t* beam_mask, const char* hidden, const int64_t* bits,
                         float* total, int64_t* best, float* kept_score, int64_t* token,
                         int64_t* kept_mask, char* kept_hidden, int64_t rows, int64_t k,
                         int64_t bytes);
}
