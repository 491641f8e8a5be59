// A whole decoder layer in one call. Nothing new is computed here: a token passes nine operations a
// layer, and calling each from Python would take a tenth of the time of decoding one token.
#include "kernels.h"

#include <vector>

namespace {

constexpr int64_t kPage = 64;  // PAGE of base.py

}  // namespace

extern "C" {

struct Layer {  // LayerWeights of layer.py; what a layer lacks is null
    const uint32_t *qkv, *output, *gate_up, *down;  // packed
    const bf16 *qkv_bias, *query_norm, *key_norm, *output_bias, *post_norm;
    int64_t heads, groups, size, hidden, inner;
};

struct Metadata {  // AttentionMetadata of layer.py
    const bf16 *cos, *sin;
    const int64_t *positions, *slots, *block_table, *seq_lens, *mask;
    int64_t rows, count, pages;
};

// hidden, normed [rows · count, hidden] → the layer's output `sum`, and `normed_sum` by `following`
// [hidden].
void eagle3_layer(const Layer* layer, const Metadata* metadata, const bf16* following,
                  const bf16* hidden, const bf16* normed, bf16* keys, bf16* values,
                  bf16* normed_sum, bf16* sum, float eps, int64_t threads) {
    const Layer& l = *layer;
    const Metadata& m = *metadata;
    const int64_t tokens = m.rows * m.count, queries = l.heads * l.size,
                  qkv_size = queries + 2 * l.groups * l.size;
    static thread_local std::vector<bf16> buffer;
    buffer.resize(tokens * std::max(qkv_size + 2 * queries, 3 * l.inner) + tokens * l.hidden);
    bf16* update = buffer.data();  // [tokens, hidden]
    bf16 *qkv = update + tokens * l.hidden, *query = qkv + tokens * qkv_size,
         *mixed = query + tokens * queries;
    bf16 *gate_up = qkv, *act = gate_up + 2 * tokens * l.inner;  // where qkv was

    eagle3_linear(normed, l.qkv, l.qkv_bias, qkv, tokens, l.hidden, qkv_size, threads);
    eagle3_rope_write(qkv, l.query_norm, l.key_norm, m.cos, m.sin, m.positions, m.slots, keys,
                      values, query, eps, tokens, l.heads, l.groups, kPage, l.size, threads);
    const int64_t sizes[] = {m.rows, m.count, l.heads, l.groups, l.size, m.pages};
    eagle3_tree_attention(query, keys, values, m.block_table, m.seq_lens, m.mask, mixed, sizes,
                          threads);
    eagle3_linear(mixed, l.output, l.output_bias, update, tokens, queries, l.hidden, threads);
    eagle3_add_rms_norm(hidden, update, l.post_norm, normed_sum, sum, eps, tokens, l.hidden,
                        threads);
    eagle3_linear(normed_sum, l.gate_up, nullptr, gate_up, tokens, l.hidden, 2 * l.inner, threads);
    eagle3_silu_mul(gate_up, act, tokens, l.inner, threads);
    eagle3_linear(act, l.down, nullptr, update, tokens, l.inner, l.hidden, threads);
    eagle3_add_rms_norm(sum, update, following, normed_sum, sum, eps, tokens, l.hidden, threads);
}

}  // extern "C"
