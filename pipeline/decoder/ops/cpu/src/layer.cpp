// All layers of a forward in one call. Nothing new is computed here: a token passes nine operations
// a layer, and calling each from Python would take a tenth of the time of decoding one token.
#include "kernels.h"

#include <vector>

namespace {

// hidden [tokens, hidden] becomes the layer's output; `normed` is read [tokens, in of qkv], and
// `output_normed` [tokens, hidden], which may be the same, is the norm of the output. `following` is
// the next layer's first weight, or null.
void forward(const Layer& l, const Metadata* metadata, const Act* normed, Act* hidden,
             Act* output_normed, Act* keys, Act* values, float eps, int64_t threads,
             const Matrix* following) {
    const int64_t tokens = metadata->tokens, hidden_size = l.output->out, inner = l.down->in;
    const int64_t qkv_size = l.qkv->out, queries = l.output->in;
    static thread_local std::vector<Act> buffer;
    buffer.resize(tokens * (std::max(qkv_size + 2 * queries, 3 * inner) + hidden_size));
    Act* update = buffer.data();  // [tokens, hidden]
    Act *qkv = update + tokens * hidden_size, *query = qkv + tokens * qkv_size,
        *mixed = query + tokens * queries;
    Act *gate_up = qkv, *act = gate_up + 2 * tokens * inner;  // where qkv was

    eagle3_linear(normed, l.qkv, l.qkv_bias, qkv, tokens, threads, l.output);
    eagle3_rope_write(qkv, l.query_norm, l.key_norm, metadata, keys, values, query, eps, l.heads,
                      l.groups, l.size, threads);
    eagle3_tree_attention(query, keys, values, metadata, mixed, l.heads, l.groups, l.size, threads);
    eagle3_linear(mixed, l.output, l.output_bias, update, tokens, threads, l.gate_up);
    eagle3_add_rms_norm(hidden, update, l.attended_norm, l.post_norm, output_normed, hidden, eps,
                        tokens, hidden_size, threads);
    eagle3_linear(output_normed, l.gate_up, nullptr, gate_up, tokens, threads, l.down);
    eagle3_gate_mul(gate_up, act, l.gelu, tokens, inner, threads);
    eagle3_linear(act, l.down, nullptr, update, tokens, threads, following);
    eagle3_add_rms_norm(hidden, update, l.fed_norm, l.norm, output_normed, hidden, eps, tokens,
                        hidden_size, threads);
}

}  // namespace

extern "C" {

// `count` layers: hidden [tokens, hidden] is overwritten with the last output, output_normed
// [tokens, hidden] is its norm; `normed` is the first layer's input. Keys and values go to planes
// of `side` numbers [count, 2, side], captured outputs to aux [tokens, captures, hidden].
void eagle3_layers(const Layer* layers, int64_t count, const Metadata* metadata, const Act* normed,
                   Act* hidden, Act* output_normed, Act* planes, int64_t side, Act* aux,
                   int64_t captures, float eps, int64_t threads) {
    const int64_t size = layers->output->out;
    for (int64_t i = 0; i < count; ++i) {
        Act* keys = planes + 2 * i * side;
        const Metadata* own = layers[i].local && metadata->local ? metadata->local : metadata;
        forward(layers[i], own, i ? output_normed : normed, hidden, output_normed, keys,
                keys + side, eps, threads, i + 1 < count ? layers[i + 1].qkv : nullptr);
        if (layers[i].captured >= 0)
            for (int64_t token = 0; token < metadata->tokens; ++token)
                std::memcpy(aux + (token * captures + layers[i].captured) * size,
                            hidden + token * size, size * sizeof(Act));
    }
}

}  // extern "C"
