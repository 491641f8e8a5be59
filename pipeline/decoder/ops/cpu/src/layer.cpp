// A whole decoder layer in one call. Nothing new is computed here: a token passes nine operations a
// layer, and calling each from Python would take a tenth of the time of decoding one token.
#include "kernels.h"

#include <vector>

extern "C" {

struct Layer {  // LayerWeights of layer.py; what a layer lacks is null
    const Matrix *qkv, *output, *gate_up, *down;
    const Act *qkv_bias, *query_norm, *key_norm, *output_bias, *post_norm;
    int64_t heads, groups, size;
};

// normed [tokens, in of qkv] and hidden [tokens, hidden] → the layer's output `sum`, and
// `normed_sum` by `following` [hidden].
void eagle3_layer(const Layer* layer, const Metadata* metadata, const Act* following,
                  const Act* hidden, const Act* normed, Act* keys, Act* values, Act* normed_sum,
                  Act* sum, float eps, int64_t threads) {
    const Layer& l = *layer;
    const int64_t tokens = metadata->tokens, hidden_size = l.output->out, inner = l.down->in;
    const int64_t qkv_size = l.qkv->out, queries = l.output->in;
    static thread_local std::vector<Act> buffer;
    buffer.resize(tokens * (std::max(qkv_size + 2 * queries, 3 * inner) + hidden_size));
    Act* update = buffer.data();  // [tokens, hidden]
    Act *qkv = update + tokens * hidden_size, *query = qkv + tokens * qkv_size,
        *mixed = query + tokens * queries;
    Act *gate_up = qkv, *act = gate_up + 2 * tokens * inner;  // where qkv was

    eagle3_linear(normed, l.qkv, l.qkv_bias, qkv, tokens, threads);
    eagle3_rope_write(qkv, l.query_norm, l.key_norm, metadata, keys, values, query, eps, l.heads,
                      l.groups, l.size, threads);
    eagle3_tree_attention(query, keys, values, metadata, mixed, l.heads, l.groups, l.size, threads);
    eagle3_linear(mixed, l.output, l.output_bias, update, tokens, threads);
    eagle3_add_rms_norm(hidden, update, l.post_norm, normed_sum, sum, eps, tokens, hidden_size,
                        threads);
    eagle3_linear(normed_sum, l.gate_up, nullptr, gate_up, tokens, threads);
    eagle3_silu_mul(gate_up, act, tokens, inner, threads);
    eagle3_linear(act, l.down, nullptr, update, tokens, threads);
    eagle3_add_rms_norm(sum, update, following, normed_sum, sum, eps, tokens, hidden_size, threads);
}

}  // extern "C"
